"""The `quartet` command, also as `python -m quartet_client`."""

import io
import signal
import sys
import traceback


def main() -> int:
    """Run the command line and return its exit status; 130 for Ctrl-C, at whatever moment it comes."""
    if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:  # its default would leave a live picture's cursor hidden
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: what the locale lacks is escaped
    try:
        from quartet_client.cli.main import main as command

        return command()
    except KeyboardInterrupt:
        return 130
    except Exception:
        from quartet_common.text import visible

        print(visible(traceback.format_exc()), end="", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
