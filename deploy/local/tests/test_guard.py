"""The guard leaves no process, whichever of command, guard and parent ends first."""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from launched import ROOT

GUARD = ROOT / "deploy" / "local" / "quartet_local" / "guard.py"
START = f"{sys.executable} -I -S {GUARD}"


@pytest.fixture
def sleeper() -> str:
    """A sleeping command with a unique name, by which it can be found."""
    return f"exec -a quartet-test-{uuid.uuid4().hex} sleep 300"


def running(sleeper: str) -> list[int]:
    found = subprocess.run(["pgrep", "-f", f"^{sleeper.split()[2]}"], capture_output=True, text=True, check=False)
    return [int(pid) for pid in found.stdout.split()]


def until(condition, timeout: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def guarded(script: str, grace: float = 5.0, parent: int = os.getpid(), **options) -> subprocess.Popen:
    command = [sys.executable, "-I", "-S", str(GUARD), str(grace), str(parent), "bash", "-c", script]
    return subprocess.Popen(command, **options)


def test_status_of_the_command_is_the_guards():
    assert guarded("exit 7").wait(10) == 7
    assert guarded("kill -9 $$").wait(10) == 128 + signal.SIGKILL
    assert guarded("exec no-such-program").wait(10) == 127


def test_detached_children_of_a_command_that_ends_are_killed(sleeper):
    script = f"setsid bash -c '{sleeper}' & (setsid bash -c '{sleeper}' &) ; read; exit 3"
    with guarded(script, stdin=subprocess.PIPE) as process:
        assert until(lambda: len(running(sleeper)) == 2)
    assert process.returncode == 3
    assert not running(sleeper)


def test_sigterm_goes_on_to_the_command_which_may_drain():
    script = "trap 'echo draining; read; exit 4' TERM; echo ready; sleep 300 & wait"
    with guarded(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.stdout.readline() == "draining\n"
        process.stdin.close()
        assert process.wait(10) == 4


def test_a_command_that_ignores_sigterm_is_killed_after_the_grace(sleeper):
    process = guarded(f"trap '' TERM; {sleeper}", grace=1.0)
    assert until(lambda: running(sleeper))
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGKILL
    assert not running(sleeper)


def test_a_second_signal_kills_at_once(sleeper):
    process = guarded(f"trap '' TERM; {sleeper}", grace=60.0)
    assert until(lambda: running(sleeper))
    for number in (signal.SIGTERM, signal.SIGINT):  # two pending signals of the same kind would be merged
        process.send_signal(number)
    assert process.wait(5) == 128 + signal.SIGKILL


def test_when_the_parent_is_killed_everything_ends(sleeper):
    parent = subprocess.Popen(["bash", "-c", f"{START} 1 $$ bash -c \"setsid bash -c '{sleeper}' & {sleeper}\" & wait"])
    assert until(lambda: len(running(sleeper)) == 2)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(5)
    assert until(lambda: not running(sleeper))


def test_a_guard_whose_parent_was_killed_before_it_began_starts_nothing():
    with guarded("echo started", parent=1, stdout=subprocess.PIPE) as process:
        assert process.stdout.read() == b"" and process.wait(10) == 128 + signal.SIGTERM
