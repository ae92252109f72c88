"""Whether a service that exits is restarted, and how often."""

import asyncio
import errno
import itertools
import os
import signal
import sys

import pytest

from quartet_client.progress import RunProgress
from quartet_local.config import SERVICES, LaunchError, LauncherSection
from quartet_local.process import Process
from quartet_local.run import end_was_due, launched
from quartet_local.supervisor import STOP_ORDER, Supervisor

pytestmark = pytest.mark.timeout(60)


KILLED_AT_FIRST = """
import os, pathlib, signal, socket, sys
starts = pathlib.Path(sys.argv[1])
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) <= int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL)
address = os.environ["NOTIFY_SOCKET"].replace("@", chr(0), 1)
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"READY=1", address)
signal.pause()
"""


class StartsOnly(Supervisor):
    """Starts processes without waiting for their health."""

    async def start(self, *names: str) -> None:
        for name in names:
            self._processes[name].start()


async def deaths(folder, steps, enough: int) -> int:
    """Supervise a process that exits immediately, until `enough` exits; return the number of exits."""
    process = Process("reward", ["sh", "-c", "exit 3"], folder / "reward.log")
    settings = LauncherSection(max_restarts=1)
    supervisor = StartsOnly({"reward": process}, settings, lambda _: None, asyncio.Event())
    died, dead_enough = 0, asyncio.Event()

    async def end_was_due(name: str, status: int) -> bool:
        nonlocal died
        died += 1
        if died >= enough:
            dead_enough.set()
        return died >= enough

    await supervisor.start("reward")
    await supervisor.keep_up_until(asyncio.create_task(dead_enough.wait()), end_was_due, steps)
    return died


def test_a_signal_stops_the_work_although_the_terminal_is_gone():
    class Launch:
        def say(self, line: str) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def hint(self) -> str:
            return ""

    async def work(launch: Launch) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(1)
        return 0

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert launched(Launch, work) == 128 + signal.SIGHUP
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # by nohup
        assert launched(Launch, work) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_end_takes_less_than_ten_seconds():
    assert sum(grace for _, grace in STOP_ORDER) < 10


@pytest.mark.parametrize(("kills", "restart"), [(1, True), (2, True), (1, False)])
async def test_a_process_that_is_killed_while_it_starts_is_started_again_once(tmp_path, kills, restart):
    command = [sys.executable, "-c", KILLED_AT_FIRST, str(tmp_path / "starts"), str(kills)]
    said: list[str] = []
    process = Process("rollout", command, tmp_path / "rollout.log")
    supervisor = Supervisor({"rollout": process}, LauncherSection(restart=restart), said.append, asyncio.Event())
    try:
        if kills == 1 and restart:
            await supervisor.start("rollout")
            assert said[0] == "rollout was killed by SIGKILL while starting; starting it again"
            assert said[1].startswith("rollout ready after ")
        else:
            with pytest.raises(LaunchError, match="rollout was killed by SIGKILL while starting: "):
                await supervisor.start("rollout")
        assert len((tmp_path / "starts").read_text()) == (2 if restart else 1)
    finally:
        await supervisor.stop()


async def test_restarts_between_which_the_run_goes_on_are_not_counted(tmp_path):
    done = itertools.count()
    assert await deaths(tmp_path, lambda: next(done), enough=5) == 5


async def test_restarts_without_a_new_step_are_counted(tmp_path):
    with pytest.raises(LaunchError, match=r"reward ended with status 3 after 1 restarts"):
        await deaths(tmp_path, lambda: 7, enough=5)


async def test_redis_and_the_broker_may_end_once_the_last_events_of_a_run_that_has_ended_were_read():
    progress, showing = RunProgress(state="active"), asyncio.get_running_loop().create_future()

    async def due() -> set[str]:
        return {name for name in ("redis", *SERVICES) if await end_was_due(progress, showing, name, status=137)}

    assert await due() == set()
    progress.state = "succeeded"  # as the broker says when it is asked, perhaps before the event comes
    assert await due() == {"reward", "rollout", "trainer"}
    showing.set_result(None)
    assert await due() == {"redis", *SERVICES}
