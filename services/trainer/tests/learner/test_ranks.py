"""Ranks come and go without hanging."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_ranks_end_right_after_a_collective(tmp_path: Path) -> None:
    """Without `distributed.shutdown`'s care this hangs within a few rounds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "leaving_ranks.py")]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store"), "10"], env=environment) for rank in (0, 1)]
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
