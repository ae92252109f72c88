"""A Redis whose clock stands still, and jumps where a test puts it, forward or back.

libfaketime is loaded before the server's own libraries and answers for the system's clock. It looks into a file each
time it is asked: a jump is one write, and holds from the next command on.
"""

import importlib.util
import os
import time
from pathlib import Path

from redis_process import RedisProcess

BEGIN = 1_800_000_000_000
"""When such a Redis begins: 2027-01-15."""


def find_library() -> Path | None:
    """Return the libfaketime of the PyPI wheel, None where there is none (it is built for Linux on x86-64)."""
    package = importlib.util.find_spec("libfaketime")
    if package is None or not package.submodule_search_locations:
        return None
    library = Path(package.submodule_search_locations[0]) / "vendor/libfaketime/src/libfaketime.so.1"
    return library if library.exists() else None


class FrozenRedis(RedisProcess):
    """A Redis process and its clock, in milliseconds."""

    def __init__(self, folder: Path, library: Path):
        self._time_file = folder / "time"
        super().__init__(
            folder,
            *("--appendonly", "no"),
            environment={
                "LD_PRELOAD": str(library),
                "FAKETIME_TIMESTAMP_FILE": str(self._time_file),
                "FAKETIME_NO_CACHE": "1",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # Redis' own timers go on
                "TZ": "UTC",
            },
        )
        self.set_clock(BEGIN)

    def set_clock(self, now: int) -> None:
        """Let it be this time, in milliseconds since 1970, from now on."""
        seconds, milliseconds = divmod(now, 1000)
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
        beside = self._time_file.with_suffix(".new")
        beside.write_text(f"{text}.{milliseconds:03}5\n")  # half a millisecond more: the library rounds down
        os.replace(beside, self._time_file)  # at once: Redis may be reading it
