"""`quartet watch` and `quartet run --attach` say what holds a run up, with the real broker and its Redis."""

import asyncio
import contextlib
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from quartet.v1 import broker_pb2 as pb
from real_broker import Life, RealBroker, door
from rich.console import Console

from quartet_client import AsyncClient, view
from quartet_client.models import ServiceStatus
from quartet_client.progress import RunProgress, starting
from quartet_client.view import RunView, watch_progress
from quartet_common.ports import free_ports
from quartet_contract.world import instance

pytestmark = pytest.mark.timeout(120)
SECONDS = 8.0
"""Within which it is said."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "STILL_SECONDS", 0.5)


def test_a_service_that_the_launcher_starts_cannot_be_reached_only_after_it_was() -> None:
    state = RunProgress("demo", coming={"rollout"})
    away = ServiceStatus("rollout", "127.0.0.1:1", "unreachable", error="refused")
    state.fold_service(away)
    assert starting(state) == {"rollout": "is starting"} and not view.waits(state)
    state.fold_service(ServiceStatus("rollout", "127.0.0.1:1", "serving"))
    state.fold_service(away)
    assert not starting(state) and "cannot be reached" in view.waits(state)["rollout"]


class Watched:
    """What `watch` prints, and which part of that was seen."""

    def __init__(self) -> None:
        self.out, self._seen = io.StringIO(), 0

    async def says(self, text: str) -> None:
        """Wait until it has said a text after the last one."""
        async with asyncio.timeout(SECONDS):
            while text not in (new := self.out.getvalue()[self._seen :]):
                await asyncio.sleep(0.05)
        self._seen += new.index(text) + len(text)

    def live(self) -> str:
        """The last picture of a live view."""
        return self.out.getvalue()


@pytest.fixture
def watching(address: str) -> Callable[..., contextlib.AbstractAsyncContextManager[Watched]]:
    @asynccontextmanager
    async def watch(broker: str = address, plain: bool = True) -> AsyncIterator[Watched]:
        watched = Watched()
        view = RunView(RunProgress("demo"), Console(file=watched.out, width=200, force_terminal=not plain), plain)
        # Not the default addresses: services of other tests may be there.
        others = dict(
            zip(("reward", "rollout", "trainer"), (f"127.0.0.1:{port}" for port in free_ports(3)), strict=True)
        )
        async with AsyncClient(broker, **others, timeout=5.0) as client:
            with view:
                task = asyncio.create_task(watch_progress(client, view))
                try:
                    yield watched
                finally:
                    assert not task.done() or not task.exception()
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

    return watch


def stepped(address: str, **spec) -> Life:
    """A run that has done a step."""
    life = Life(address, "demo", groups_per_step=2, max_staleness=50, **spec)
    submit(life, 0, 2)
    life.answer()
    life.train()
    life.report(step=pb.StepFinished(step=0, policy_version=1))
    return life


def submit(life: Life, first: int, count: int) -> None:
    prompts = [instance(f"p/{number}") for number in range(first, first + count)]
    life.call("SubmitPrompts", pb.SubmitPromptsRequest(run_id="demo", instances=prompts))


async def test_a_full_queue_that_nobody_empties_is_said_and_its_end(address, watching):
    life = stepped(address, max_queued_prompts=8)
    async with watching() as watched:
        await watched.says("step 1")
        submit(life, 2, 8)
        await watched.says(
            "waiting: the broker's queue is full: 8 prompts wait, and at most 8 may (run.max_queued_prompts)"
        )
        life.answer(2)
        await watched.says("going on: queue")


async def test_a_queue_that_is_emptied_is_no_obstacle(address, watching, monkeypatch):
    monkeypatch.setattr(view, "STILL_SECONDS", 3.0)
    life = stepped(address, max_queued_prompts=8)
    async with watching() as watched:
        await watched.says("step 1")
        for turn in range(8):  # full again and again, but never for long
            submit(life, 2 + turn, 8 if turn == 0 else 1)
            life.answer(1)
            await asyncio.sleep(0.5)
        assert "queue" not in watched.live()


async def test_experience_up_to_its_limit_is_said_and_its_end(address, watching):
    life = stepped(address, max_experience_bytes=5000)
    async with watching() as watched:
        await watched.says("step 1")
        submit(life, 2, 30)
        life.answer(30)
        life.answer(30)
        await watched.says("waiting: the broker is full: ")
        await watched.says("at most 5,000 may be (run.max_experience_bytes); rollouts get no prompts until")
        life.train(1)
        life.commit(2)
        await watched.says("going on: experience")


async def test_a_redis_without_room_is_said_and_its_end(address, broker: RealBroker, watching):
    life = stepped(address)
    async with watching() as watched:
        await watched.says("step 1")
        broker.set_maxmemory("1")
        try:
            with pytest.raises(grpc.RpcError, match="OOM, its memory is full"):
                submit(life, 2, 1)
            await watched.says("waiting: the broker waits for room in Redis: its memory is full")
        finally:
            broker.set_maxmemory("0")
        await watched.says("going on: broker")


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "live"])
async def test_a_broker_that_is_away_is_said_and_its_return(address, nowhere, watching, plain):
    stepped(address)
    with contextlib.ExitStack() as opened:
        opened.enter_context(door(nowhere, address))
        async with watching(nowhere, plain) as watched:
            await watched.says("step 1" if plain else "broker")
            opened.close()
            await watched.says(f"the broker cannot be reached at {nowhere}")
            with door(nowhere, address):
                await watched.says("going on: broker" if plain else "serving")
