"""A run with each service on its own host, the trainer on two, and mutual TLS: a host is cut off, then a link is slow.

Before, the trainer's ranks are started with a wrong interface; at the end, the run is audited.

    python tests/hosts/scenario.py FOLDER       # run `lan.within`; the folder, for data and logs, is empty or new

The last line printed is the number of committed groups. Exit status 0 if the run survived and every group counted
exactly once.
"""

import asyncio
import re
import shlex
import sys
from contextlib import closing
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from lan import INTERFACE, Lan

from quartet_client import AsyncClient
from quartet_client.authority import EXPORTED, create_authority, export, issue
from quartet_client.events import MemberChanged, RunEvent, WeightsPublished
from quartet_common.config import SecuritySection

sys.path.append(str(Path(__file__).resolve().parents[1] / "upgrade"))
from live_run import SERVICES, EventWaiter, LiveRun, steps  # noqa: E402 (beside the other suite's tests)
from preloaded import ROOT, Pythons, make_models  # noqa: E402
from started import Started  # noqa: E402

HOSTS = {"alpha": "10.79.0.1", "beta": "10.79.0.2", "gamma": "10.79.0.3", "delta": "10.79.0.4"}
PLACES = {
    "redis": "alpha",
    "broker": "alpha",
    "reward": "beta",
    "rollout": "beta",
    "trainer": "gamma",
    "rank-1": "delta",
    "client": "delta",
}
PORTS = {"broker": 7101, "reward": 7102, "rollout": 7103, "trainer": 7104}
TTL_SECONDS = 4.0  # of leases and members
SLOW_KBIT = 8000
REFUSED_SECONDS = 120.0  # most of it imports
PAGE = ROOT / "docs" / "hosts.md"


class SeveralHosts(LiveRun):
    """The trainer's ranks are started by the commands of docs/hosts.md, each in an interpreter of its own."""

    def start_rank(self, rank: int, *options: str) -> Started:
        """Start a rank in a folder with what the commands name. The page's `alpha` is the first rank's host here."""
        name = ("trainer", "rank-1")[rank]
        (function, *_), (line,) = (
            re.findall(line, PAGE.read_text(), re.MULTILINE) for line in (r"^tls\(\) .*", f"^RANK={rank} .*(?= &)")
        )
        line = line.replace("MASTER_ADDR=10.79.0.1 ", f"MASTER_ADDR={HOSTS[PLACES['trainer']]} ")
        self._start(name, ["sh", "-c", f"{function}\nexec env {line} {shlex.join([*self.arguments[1:], *options])}"])
        return self.processes[name]


def rollout_gone(events: list[RunEvent]) -> bool:
    """Return whether a rollout's registration has expired."""
    return any(isinstance(e.what, MemberChanged) and e.what.gone and e.what.member.kind == "rollout" for e in events)


def published(events: list[RunEvent]) -> list[RunEvent]:
    """Return the events of weight updates."""
    return [event for event in events if isinstance(event.what, WeightsPublished)]


def make_certificates(folder: Path) -> None:
    """Create a certificate for each process, for its role and its host's address only, and two for the harness."""
    authority = folder / "authority"
    create_authority(authority)
    for kind in (*SERVICES, "client", "operator"):
        issue(authority, kind, [kind], [HOSTS[PLACES[kind]]] if kind in SERVICES else [])
        export(authority, kind, folder / kind)


def tls(folder: Path, name: str) -> dict[str, object]:
    """Return the settings of [security] for a certificate's holder."""
    files = zip(("tls_ca", "tls_certificate", "tls_key"), EXPORTED, strict=True)
    return {f"security.{key}": folder / name / file for key, file in files}


def make_run(folder: Path, pythons: Pythons, lan: Lan) -> SeveralHosts:
    """Return the run, nothing started."""
    pki = folder / "keys"
    make_certificates(pki)
    (folder / "run.toml").symlink_to(ROOT / "examples" / "arithmetic" / "run.toml")
    (folder / ".quartet").symlink_to(ROOT / ".quartet")
    return SeveralHosts(
        folder,
        folder / "model",
        pythons,
        addresses={kind: f"{HOSTS[PLACES[kind]]}:{port}" for kind, port in PORTS.items()},
        settings={
            "run.prompt_lease_ttl": TTL_SECONDS,
            "run.member_ttl": TTL_SECONDS,
            "broker.sweep_interval": 0.5,
            "trainer.weights.interface": INTERFACE,
        },
        within=lambda name, command: lan.command(PLACES[name], command),
        own={name: tls(pki, name) for name in (*SERVICES, "client")},
    )


async def run_scenario(folder: Path, pythons: Pythons) -> int:
    """Run the scenario and return the number of committed groups. Raises AssertionError."""
    lan = Lan(HOSTS)
    make_models(pythons["trainer"], folder / "model")
    live = make_run(folder, pythons, lan)
    try:
        ranks = [live.start_rank(rank, "--set", "trainer.interface=lo") for rank in range(2)]
        live.start_redis()
        for kind in SERVICES[:-1]:
            live.start(kind)
        refused(ranks)
        for rank in range(2):
            live.start_rank(rank)
        files = {key.partition(".")[2]: value for key, value in tls(folder / "keys", "operator").items()}
        async with AsyncClient(**live.addresses, security=SecuritySection(**files)) as client:

            async def serving() -> bool:
                return all(status.health == "serving" for status in await client.status())

            await live.until("all four answer", serving)
            await live.begin(client)
            waiter = EventWaiter(live, client)
            try:
                await waiter.until("the run trains, each service on a host of its own, with mutual TLS", steps(2))
                await partition(waiter, lan)
                await slow_link(waiter, lan)
            finally:
                await waiter.close()
            run = await live.finish(client)
    finally:
        live.close()
    return run.stats.committed


def refused(ranks: list[Started]) -> None:
    """Wait until both ranks, whose interface is loopback, have ended with the same sentence and status 2."""
    for rank in ranks:
        assert rank.wait(REFUSED_SECONDS) == 2, rank.said()
        assert "Traceback" not in rank.said(), rank.said()
    sentences = [re.findall(r"rank \d on \w+, at 127.*", rank.said()) for rank in ranks]
    assert len(sentences[0]) == 1 and sentences[0] == sentences[1], sentences
    assert re.search(r"\(lo\), cannot reach rank . on (gamma|delta) at 127.0.0.1: .*; set trainer.inter", *sentences[0])
    print("with loopback as their interface, both ranks end", flush=True)


async def partition(waiter: EventWaiter, lan: Lan) -> None:
    """Cut the rollout's host off until its registration expires, reconnect it, and wait until the run continues."""
    lan.cut(PLACES["rollout"])
    print("beta is cut off", flush=True)
    await waiter.until("the broker has given its rollout up", rollout_gone)
    lan.heal(PLACES["rollout"])
    await waiter.until("beta is back, and the run goes on", steps(2))


async def slow_link(waiter: EventWaiter, lan: Lan) -> None:
    """Slow the link to the rollout during two weight updates."""
    lan.slow(PLACES["rollout"], SLOW_KBIT)
    slow_since = datetime.now(UTC)
    print(f"the link to beta is slow: {SLOW_KBIT} kbit/s", flush=True)

    def slow(events: list[RunEvent]) -> list[RunEvent]:
        """Return the updates since then: earlier events may arrive late."""
        return [event for event in published(events) if event.at > slow_since]

    events = await waiter.until("the run goes on over the slow link", lambda events: len(slow(events)) >= 3)
    lan.quick(PLACES["rollout"])
    # The first may have started before the link became slow.
    updates = slow(events)
    waits = [(after.at - before.at).total_seconds() for before, after in pairwise(updates)]
    for update, seconds in zip(updates[1:], waits, strict=True):
        least = update.what.bytes * 8 / (1000 * SLOW_KBIT)
        assert seconds > least / 2, f"{update} came {seconds} s after the one before: the link is not slow"
    await waiter.until("the link is quick again", steps(1))


if __name__ == "__main__":
    with closing(Pythons()) as pythons:
        print(asyncio.run(run_scenario(Path(sys.argv[1]).resolve(), pythons)))
