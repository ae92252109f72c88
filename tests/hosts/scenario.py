"""A run of which each service is on another host, with mutual TLS; a host is cut off, a link is slow; then the audit.

    python tests/hosts/scenario.py FOLDER MODEL [--rounds 1]

It makes its hosts itself (`lan.within`). What happened is printed as it happens; the last line is JSON: what was
counted. Exit status 0 if the run survived and every prompt group counted exactly once.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from lan import HOSTS, INTERFACE, Lan, within

from quartet_client import AsyncClient
from quartet_client.authority import EXPORTED, create_authority, export, issue
from quartet_client.events import MemberChanged, RunEvent, StepFinished, WeightsPublished
from quartet_client.runs import Run
from quartet_common.config import SecuritySection

sys.path.append(str(Path(__file__).resolve().parents[1] / "upgrade"))
from another_build import checkout  # noqa: E402 (beside the other suite's tests)
from live_run import KINDS, RUN, LiveRun  # noqa: E402

INSIDE = "QUARTET_HOSTS_INSIDE"
PLACES = {
    "redis": "alpha",
    "broker": "alpha",
    "reward": "beta",
    "rollout": "beta",
    "trainer": "gamma",
    "client": "delta",
}
PORTS = {"broker": 7101, "reward": 7102, "rollout": 7103, "trainer": 7104}
TTL_SECONDS = 4.0  # of leases and members
SLOW_KBIT = 8000
SECONDS = 300.0  # for anything that is waited for


class Story:
    """The run's events as they come, for whoever waits for one."""

    def __init__(self, live: LiveRun, client: AsyncClient):
        self._live, self._client = live, client
        self._news = asyncio.Condition()
        self.events: list[RunEvent] = []
        self._reading: asyncio.Task | None = None

    async def until(self, what: str, wanted: Callable[[list[RunEvent]], bool]) -> list[RunEvent]:
        """Wait until the events from now on are as wanted; return them. Raises AssertionError if they do not come."""
        begin = len(self.events)
        deadline = time.monotonic() + SECONDS
        self._reading = self._reading or asyncio.create_task(self._read())
        while not wanted(self.events[begin:]):
            self._live.must_run()
            if self._reading.done():
                self._reading.result()
                raise AssertionError(f"the run ended before: {what}")
            assert time.monotonic() < deadline, f"{what}: not within {SECONDS:.0f} s\n{self._live.logs()}"
            async with self._news:
                try:
                    async with asyncio.timeout(1):  # to look whether all processes run
                        await self._news.wait()
                except TimeoutError:
                    continue
        print(what, flush=True)
        return self.events[begin:]

    async def _read(self) -> None:
        async for event in self._client.watch(RUN):
            self.events.append(event)
            async with self._news:
                self._news.notify_all()

    async def close(self) -> None:
        """Listen no more."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)


def steps(count: int) -> Callable[[list[RunEvent]], bool]:
    """So many steps were trained."""
    return lambda events: sum(isinstance(event.what, StepFinished) for event in events) >= count


def rollout_gone(events: list[RunEvent]) -> bool:
    """The broker has given a rollout up."""
    return any(isinstance(e.what, MemberChanged) and e.what.gone and e.what.member.kind == "rollout" for e in events)


def published(events: list[RunEvent]) -> list[RunEvent]:
    """Return the updates of weights among events."""
    return [event for event in events if isinstance(event.what, WeightsPublished)]


def make_certificates(folder: Path) -> None:
    """One for each process, good for its host's address and its role alone, two for the harness; a folder each."""
    authority = folder / "authority"
    create_authority(authority)
    for kind in (*KINDS, "client", "operator"):
        issue(authority, kind, [kind], [HOSTS[PLACES[kind]]] if kind in KINDS else [])
        export(authority, kind, folder / kind)


def tls(folder: Path, name: str) -> dict[str, object]:
    """Return the keys of [security] of one holder."""
    files = zip(("tls_ca", "tls_certificate", "tls_key"), EXPORTED, strict=True)
    return {f"security.{key}": folder / name / file for key, file in files}


def make_run(folder: Path, model: Path, lan: Lan) -> LiveRun:
    """Return the run, nothing started."""
    pki = folder / "pki"
    make_certificates(pki)
    return LiveRun(
        folder,
        model,
        addresses={kind: f"{HOSTS[PLACES[kind]]}:{port}" for kind, port in PORTS.items()},
        settings={"run.prompt_lease_ttl": TTL_SECONDS, "run.member_ttl": TTL_SECONDS, "broker.sweep_interval": 0.5},
        within=lambda name, command: lan.command(PLACES[name], command),
        own={name: tls(pki, name) for name in (*KINDS, "client")},
        # Where a host's name is not its address on this network, Gloo has to be told the interface.
        environment={"rollout": {"GLOO_SOCKET_IFNAME": INTERFACE}},
    )


async def play(folder: Path, model: Path, rounds: int) -> dict[str, object]:
    """Return what was counted. Raises AssertionError if something is not as it must be."""
    lan = Lan()
    live = make_run(folder, model, lan)
    try:
        live.start_redis()
        for kind in KINDS:
            live.start(kind, checkout())
        files = {key.partition(".")[2]: value for key, value in tls(folder / "pki", "operator").items()}
        async with AsyncClient(**live.addresses, security=SecuritySection(**files)) as client:
            await serving(live, client)
            live.attach(checkout())
            await made(live, client)
            story = Story(live, client)
            try:
                await story.until("the run trains, each service on a host of its own, with mutual TLS", steps(2))
                slowest = 0.0
                for _ in range(rounds):
                    await partition(story, lan)
                    slowest = max(slowest, await slow_link(story, lan))
            finally:
                await story.close()
            run = await finish(live, client)
    finally:
        live.close()
    return {"committed": run.stats.committed, "redelivered": run.stats.redelivered, "slowest_update": slowest}


async def partition(story: Story, lan: Lan) -> None:
    """The rollout's host is cut off until the broker has given the rollout up; then it is back, and the run goes on."""
    lan.cut(PLACES["rollout"])
    print("beta is cut off", flush=True)
    await story.until("the broker has given its rollout up", rollout_gone)
    lan.heal(PLACES["rollout"])
    await story.until("beta is back, and the run goes on", steps(2))


async def slow_link(story: Story, lan: Lan) -> float:
    """The link to the rollout is slow for some updates of weights; returns the most seconds from one to the next."""
    lan.slow(PLACES["rollout"], SLOW_KBIT)
    print(f"the link to beta is slow: {SLOW_KBIT} kbit/s", flush=True)
    events = await story.until("the run goes on over the slow link", lambda events: len(published(events)) >= 3)
    lan.quick(PLACES["rollout"])
    # The first may have been on its way when the link became slow. Each of the others had to come through it.
    updates = published(events)
    waits = [(after.at - before.at).total_seconds() for before, after in pairwise(updates)]
    for update, seconds in zip(updates[1:], waits, strict=True):
        least = update.what.bytes * 8 / (1000 * SLOW_KBIT)
        assert seconds > least / 2, f"{update} came {seconds} s after the one before: the link is not slow"
    await story.until("the link is quick again", steps(1))
    return max(waits)


async def serving(live: LiveRun, client: AsyncClient) -> None:
    """Wait until all four answer."""
    deadline = time.monotonic() + SECONDS
    while not all(status.health == "serving" for status in await client.status()):
        live.must_run()
        assert time.monotonic() < deadline, live.logs()
        await asyncio.sleep(0.2)


async def made(live: LiveRun, client: AsyncClient) -> None:
    """Wait until the run is made."""
    deadline = time.monotonic() + SECONDS
    while RUN not in {run.run_id for run in await client.runs()}:
        live.must_run()
        assert time.monotonic() < deadline, live.logs()
        await asyncio.sleep(0.2)


async def finish(live: LiveRun, client: AsyncClient) -> Run:
    """End the run's prompts, wait for its end, and audit it."""
    status = await asyncio.to_thread(live.stop, "client", signal.SIGINT)
    assert status == 130, f"the feeder ended with {status}: {live.log('client')[-2000:]}"
    await client.end_prompts(RUN)
    status = await asyncio.to_thread(live.wait, "trainer", SECONDS)
    assert status == 0, f"the trainer ended with {status}: {live.log('trainer')[-2000:]}"
    run = await client.run(RUN)
    assert run.state == "succeeded", run
    audit = await asyncio.to_thread(live.audit)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert f"{run.stats.committed} exactly once, 0 lost, 0 twice, 0 stuck" in audit.stdout, audit.stdout
    print(audit.stdout.strip(), flush=True)
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description="A run over several hosts, one of which is cut off, one link slow.")
    parser.add_argument("folder", type=Path, help="for data and logs; must be empty or new")
    parser.add_argument("model", type=Path, help="the policy to begin with, e.g. of examples/arithmetic/prepare.py")
    parser.add_argument("--rounds", type=int, default=1, help="partitions and slow links in turn (default: 1)")
    arguments = parser.parse_args()
    if os.environ.get(INSIDE) != "1":
        command = within([sys.executable, __file__, *sys.argv[1:]])
        os.execvpe(command[0], command, {**os.environ, INSIDE: "1"})
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    counted = asyncio.run(play(folder, arguments.model.resolve(), arguments.rounds))
    print(json.dumps(counted))
    return 0


if __name__ == "__main__":
    sys.exit(main())
