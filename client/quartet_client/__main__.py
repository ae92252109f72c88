"""The `quartet` command, also as `python -m quartet_client`."""

import atexit
import gc
import io
import os
import signal
import sys
import traceback
from typing import NoReturn


def start() -> NoReturn:
    """Run the command line, and end the process with its exit status."""
    ended: list[int] = []
    atexit.register(_leave, ended)  # registered first, so called last
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    """Skip the interpreter's finalization if Arrow was loaded.

    Arrow's threads may release a Python file after the call that read it has returned. One that waits for the
    interpreter's lock when finalization begins ends the process by SIGABRT (apache/arrow#33975, #45214).
    """
    if ended and "pyarrow" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended[0])


def main() -> int:
    """Run the command line and return its exit status; 130 for Ctrl-C, at whatever moment it comes."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # its default would leave a live picture's cursor hidden
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what the locale lacks is escaped
    gc.disable()  # imports make objects that stay
    try:
        from quartet_client.cli.main import main as command

        gc.enable()
        return command()
    except KeyboardInterrupt:
        return 130
    except Exception:
        from quartet_common.text import visible

        print(visible(traceback.format_exc()), end="", file=sys.stderr)
        return 1


if __name__ == "__main__":
    start()
