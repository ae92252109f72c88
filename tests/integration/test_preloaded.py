"""A preloaded service: started again and again as if by `python -m`, imported once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("preloaded.py")
MAIN = """
import sys
from toy import part

def main():
    print(part.COUNT, sys.argv[1:])
    part.COUNT += 1
    return int(sys.argv[1])
"""


@pytest.fixture
def toy(tmp_path):
    """A service of two modules, and how to talk to it while it is preloaded."""
    package = tmp_path / "toy"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(MAIN)
    (package / "part.py").write_text("COUNT = 0\n")
    command = [sys.executable, str(PROGRAM), "toy"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}  # as every service has it
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process
        process.stdin.close()
        assert process.wait(30) == 0


def start(process: subprocess.Popen, log: Path, *arguments: str) -> tuple[int, int]:
    """Return the pid and the exit status of one start."""
    process.stdin.write(json.dumps({"arguments": list(arguments), "log": str(log)}) + "\n")
    return json.loads(process.stdout.readline())["pid"], json.loads(process.stdout.readline())["status"]


@pytest.mark.timeout(60)
def test_every_start_is_a_process_with_nothing_of_an_earlier_one(toy, tmp_path):
    first, status = start(toy, tmp_path / "first.log", "0", "a")
    assert (status, (tmp_path / "first.log").read_text()) == (0, "0 ['0', 'a']\n")
    second, status = start(toy, tmp_path / "second.log", "3")
    assert (status, (tmp_path / "second.log").read_text()) == (3, "0 ['3']\n")
    assert first != second


@pytest.mark.timeout(60)
def test_what_a_service_raises_is_in_its_log_and_its_status_is_1(toy, tmp_path):
    _, status = start(toy, tmp_path / "log", "no number")
    assert status == 1
    assert "ValueError: invalid literal for int()" in (tmp_path / "log").read_text()
