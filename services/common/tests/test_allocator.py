"""Freed memory is kept, so that the next message does not fault it in again."""

import os
import subprocess
import sys

# A block of a message's size is taken and freed again and again: the pages that this touches for the first time.
_PROGRAM = """
import resource, sys
from quartet_common.process import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "kept" else False
bytes(b"x") * (4 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    b"x" * (4 << 20)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(argument: str, **environment: str) -> tuple[str, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", _PROGRAM, argument]
    kept, faults = subprocess.check_output(command, env=clean | environment, text=True, timeout=60).split()
    return kept, int(faults)


def test_large_blocks_are_not_faulted_in_again_unless_the_environment_says_otherwise():
    kept, faults = _run("kept")
    assert kept == "True" and faults < _run("as it is")[1] / 4  # 20 blocks of 1024 pages
    assert _run("kept", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"
