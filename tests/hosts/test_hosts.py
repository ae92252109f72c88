"""A run whose services are on several hosts survives a partition and a slow link; see scenario.py and docs/hosts.md."""

import subprocess
import sys
from pathlib import Path

import pytest
import scenario
from lan import why_not, within

pytestmark = pytest.mark.timeout(900)


def test_a_run_over_several_hosts_survives_a_partition_and_a_slow_link(tmp_path: Path):
    reason = why_not()
    if reason:
        pytest.skip(reason)
    command = within([sys.executable, scenario.__file__, str(tmp_path)])
    done = subprocess.run(command, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.splitlines()[-1]) >= 10
