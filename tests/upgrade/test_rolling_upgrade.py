"""Each service of a running run is replaced by another build; no group is lost or trained twice.

install.sh upgrades some of them, and rolls them back: broker and reward, or those that UPGRADE_INSTALLED names, e.g.
"broker reward rollout trainer", whose packages take gigabytes and minutes.
"""

import asyncio
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from another_build import Build, checkout, next_build
from installed_run import InstalledRun, why_not
from live_run import RUN, SECONDS, SERVICES, LiveRun
from preloaded import Pythons, make_models

from quartet_client import AsyncClient, Handle, QuartetError
from quartet_common.errors import AWAY

INSTALLED = [] if why_not() else os.environ.get("UPGRADE_INSTALLED", "broker reward").split()
pytestmark = pytest.mark.timeout(3600 if {"rollout", "trainer"} & set(INSTALLED) else 900)
DRAIN_SECONDS = 10.0  # [server] drain_seconds by default
BACK_SECONDS = 30.0  # from SIGTERM to READY: 1 to 5 s alone, and several times that beside the imports of other suites
SHOWN = re.compile(r"^step \d", re.MULTILINE)


@pytest.fixture
def live() -> Iterator[InstalledRun]:
    with closing(Pythons()) as pythons, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # for the services' users
        libraries = {kind: pythons.libraries(kind) for kind in SERVICES}
        make_models(libraries["trainer"], folder / "model")
        with closing(InstalledRun(folder, folder / "model", libraries, INSTALLED)) as run:
            yield run


class Asker:
    """A client that uses the policy during the upgrade, one prompt at a time."""

    def __init__(self, client: AsyncClient):
        self._client = client
        self._enough = asyncio.Event()
        self.answers: list[str] = []

    async def ask(self) -> None:
        """Ask until `stop`. Raises QuartetError, except while a service is unavailable."""
        while not self._enough.is_set():
            name = f"asked-{len(self.answers)}"
            handle = await self._submit(name)
            groups = [group async for group in self._client.results([handle], timeout=SECONDS)]
            assert [group.instance_id for group in groups] == [name]
            assert not groups[0].dead and groups[0].completions
            self.answers.append(name)
            await asyncio.sleep(0.3)  # less than a service is away

    async def _submit(self, name: str) -> Handle:
        """Submit with an instance id, which makes a retry safe whether or not the failed call was executed."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                prompt = {"prompt": "1+2=?", "gt_answer": "3"}
                return (await self._client.submit(RUN, [prompt], instance_ids=[name]))[0]
            except QuartetError as error:
                if error.code not in AWAY or time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)

    def stop(self) -> None:
        """Have `ask` return after the current answer."""
        self._enough.set()


async def wait_for_build(live: LiveRun, client: AsyncClient, kind: str, build: Build) -> None:
    """Wait until a service reports a build in its handshake."""

    async def answers() -> bool:
        status = await client.get_service(kind)
        return status.health == "serving" and status.build == build.version

    await live.until(f"{kind} is of the build {build.name}", answers)


async def two_steps(live: LiveRun, client: AsyncClient) -> int:
    """Wait until two more steps are trained; return the number of steps."""
    wanted = (await client.get_run(RUN)).policy_version + 2

    async def trained() -> bool:
        return (await client.get_run(RUN)).policy_version >= wanted

    await live.until("two more steps", trained)
    return wanted


async def upgrade(live: InstalledRun, before: Build, after: Build) -> None:
    """Replace every service of a run, and check the run's result."""
    live.start_redis()
    for kind in SERVICES:
        await asyncio.to_thread(live.start, kind, before)
    async with AsyncClient(**live.addresses) as client:
        for kind in SERVICES:
            await wait_for_build(live, client, kind, before)
        await live.begin(client)
        await two_steps(live, client)
        asker = Asker(client)
        asking = asyncio.create_task(asker.ask())
        for kind in SERVICES:
            if kind in live.installed:
                await upgrade_by_installer(live, client, kind, before, after)
            else:
                assert await asyncio.to_thread(live.stop, kind) == 0, live.logs()
                await asyncio.to_thread(live.start, kind, after)
                await wait_for_build(live, client, kind, after)
                # The new client requests the run with a key that the run was created without.
                await attach_again(live, after)
            answered = len(asker.answers)
            step = await two_steps(live, client)
            while len(asker.answers) == answered and not asking.done():
                await asyncio.wait([asking], timeout=0.1)
            if asking.done():
                asking.result()  # raises its error
        asker.stop()
        await asyncio.wait_for(asking, SECONDS)
        await attach_again(live, before)
        run = await live.finish(client)
    assert run.policy_version >= step
    # Every prompt submitted for training was trained once; none is in progress, dead or dropped.
    # (A group may have become too stale while the trainer was down; its prompt is generated again.)
    stats = run.stats
    assert (stats.queued, stats.leased, stats.ready, stats.leased_to_trainer, stats.trained) == (0, 0, 0, 0, 0)
    assert (stats.dead, stats.dropped) == (0, 0)
    assert stats.committed == stats.submitted - len(asker.answers)
    assert len(asker.answers) == len(set(asker.answers)) >= len(SERVICES)
    for name in ("client", *SERVICES):
        assert "Traceback" not in live.log(name), live.log(name)[-3000:]


async def upgrade_by_installer(live: InstalledRun, client: AsyncClient, kind: str, before: Build, after: Build) -> None:
    """Upgrade a service with a plug-in after a refused attempt, and roll it back."""
    assert "nonsense" in await asyncio.to_thread(live.refused, kind, after)
    done = await asyncio.to_thread(live.install, kind, after, "--with", live.plug_ins[kind])
    assert done.returncode == 0, done.stdout + done.stderr
    await wait_for_build(live, client, kind, after)
    assert live.has_plug_in(kind)
    await attach_again(live, after)
    done = await asyncio.to_thread(live.install, kind, after, "--rollback")
    assert done.returncode == 0, done.stdout + done.stderr
    await wait_for_build(live, client, kind, before)
    assert not live.has_plug_in(kind)
    assert [status for name, status in live.host.ended if name == kind] == [0, 0], live.log(kind)[-3000:]
    assert max(live.host.drained[kind]) <= DRAIN_SECONDS
    _, *away = live.host.away[kind]
    print(f"{kind} was away for {away} s", flush=True)
    assert max(away) <= (60 if kind in ("rollout", "trainer") else BACK_SECONDS)  # these import torch and load a model


async def attach_again(live: LiveRun, build: Build) -> None:
    """Stop the client by SIGINT, start one of a build, and wait until it shows a step."""
    assert await asyncio.to_thread(live.stop, "client", signal.SIGINT) == 130, live.log("client")[-3000:]
    live.attach(build)

    async def shown() -> object:
        return SHOWN.search(live.processes["client"].said())

    await live.until("the client shows a step", shown)


async def test_every_service_is_replaced_by_the_next_build_in_a_live_run(live, tmp_path):
    await upgrade(live, checkout(), next_build(tmp_path / "next"))
