"""Many mixed verifications by one reward service, and whether it leaks: `make soak` (100,000), or fewer.

    .quartet/envs/dev/bin/python tests/soak/reward.py [--items 100000] [--in-flight 64]

Of the items 10% are the hostile answers of tests/hostile; the rest are right and wrong answers, plain ones and such as
only a worker can compare, and programs with their cases where the sandbox's minimum mode is to be had (--no-code leaves
them out). All go through one ScoreStream, eight a message. Every verdict must be an allowed one; a retryable failure is
sent again, three times at most. The service is a process of its own; a sample of it and its children is taken every 2%:

    rss      of the service, in bytes         processes   of its tree, itself included
    threads  of the service                   zombies     of its tree, at rest after the last item
    fds      of the service

It has leaked if it has grown (`growth`) by more than what is allowed (`ALLOWED`), or if anything of its tree is left
when it has ended. The last line is JSON; the status is 1 after a leak or a wrong verdict.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "services" / "reward")]

import psutil  # noqa: E402
from measuring import server_at, service  # noqa: E402
from quartet.v1 import reward_pb2, reward_pb2_grpc  # noqa: E402

from quartet_common.channel import connect  # noqa: E402
from quartet_reward.config import SandboxSection  # noqa: E402
from quartet_reward.sandbox.modes import check_sandbox  # noqa: E402
from tests.hostile.answers import ANSWERS  # noqa: E402

# Threads: asyncio's pool for waiting on ended processes fills up to this. The rest is what is under way.
ALLOWED = {"rss": 24 << 20, "threads": (os.cpu_count() or 1) + 4, "fds": 8, "processes": 3, "least rss": 16 << 20}
# What is remembered is full long before the samples that are compared begin: until then memory grows, as it may.
SETTINGS = [f"reward.{key}" for key in ("workers=2", "deadline_seconds=2", "max_queue=1024", "cache_bytes=1048576")]
A_MESSAGE = 8
MOST_ATTEMPTS = 4
HOSTILE_SHARE, WORKER_SHARE, CODE_SHARE = 0.10, 0.10, 0.10
REST_SECONDS = 20.0

RIGHT = frozenset({reward_pb2.OUTCOME_CORRECT})
WRONG = frozenset({reward_pb2.OUTCOME_INCORRECT})
# On a busy machine an honest comparison may need longer than the short deadline of this test.
SLOW = frozenset({reward_pb2.OUTCOME_TIMED_OUT})


@dataclass(frozen=True)
class Sent:
    """An item and what may come of it."""

    item: reward_pb2.ScoreItem
    allowed: frozenset[int]
    attempts: int = 1


def items(count: int, code: bool, rng: random.Random) -> Iterator[Sent]:
    """Make the items, each another one."""
    for number in range(count):
        kind, right = rng.random(), rng.random() < 0.5
        verdict = RIGHT if right else WRONG
        if kind < HOSTILE_SHARE:
            hostile = rng.choice(ANSWERS)
            yield Sent(item(number, hostile.completion, hostile.reference, "math"), hostile.allowed)
        elif kind < HOSTILE_SHARE + WORKER_SHARE:
            told = number if right else number + 1
            completion = rf"\boxed{{\frac{{x}}{{x+{told + 1}}}}}"
            yield Sent(item(number, completion, rf"1-\frac{{{number + 1}}}{{x+{number + 1}}}", "math"), verdict | SLOW)
        elif code and kind < HOSTILE_SHARE + WORKER_SHARE + CODE_SHARE:
            program = f"```python\nprint(int(input()) {'+' if right else '-'} {number + 1})\n```"
            cases = [reward_pb2.TestCase(input=str(n), output=str(n + number + 1)) for n in (1, 2)]
            yield Sent(item(number, program, "", "code", test_cases=cases), verdict | SLOW)
        else:
            told = number if right else number + 1
            yield Sent(item(number, rf"so it is \boxed{{{told}}}", str(number), "math"), verdict)


def item(number: int, completion: str, answer: str, verifier: str, **reference) -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(
        item_id=str(number),
        completion=completion,
        reference=reward_pb2.Reference(answer=answer, **reference),
        verifiers=[reward_pb2.VerifierSpec(name=verifier)],
        run_id=f"run-{number % 3}",
    )


class Soak:
    """One stream, so many items in flight."""

    def __init__(
        self, stub: reward_pb2_grpc.RewardServiceStub, server: psutil.Process, todo: Iterator[Sent], count: int
    ):
        self._call = stub.ScoreStream()
        self._server, self._todo, self._count = server, todo, count
        self._in_flight: dict[str, Sent] = {}
        self._again: list[Sent] = []
        self.done = 0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[dict[str, int]] = []

    async def run(self, in_flight: int) -> None:
        """Send and check everything."""
        every = max(self._count // 50, 1)
        while self.done < self._count:
            while len(self._in_flight) + A_MESSAGE <= in_flight and (batch := self._next()):
                await self._call.write(reward_pb2.ScoreStreamRequest(items=[sent.item for sent in batch]))
            async with asyncio.timeout(300):
                message = await self._call.read()
            for result in message.results:
                self._check(result)
                if self.done // every > len(self.samples):
                    self.samples.append(sample(self._server))
                    print(f"{self.done} done {self.samples[-1]}", file=sys.stderr, flush=True)
        await self._call.done_writing()

    def _next(self) -> list[Sent]:
        batch, self._again = self._again[:A_MESSAGE], self._again[A_MESSAGE:]
        while len(batch) < A_MESSAGE and (sent := next(self._todo, None)):
            batch.append(sent)
        for sent in batch:
            self._in_flight[sent.item.item_id] = sent
        return batch

    def _check(self, result: reward_pb2.ScoreResult) -> None:
        sent = self._in_flight.pop(result.item_id)
        if result.HasField("failure"):
            self.outcomes[reward_pb2.FailureKind.Name(result.failure.kind)] += 1
            if result.failure.retryable and sent.attempts < MOST_ATTEMPTS:
                again = reward_pb2.ScoreItem()
                again.CopyFrom(sent.item)
                again.item_id += "+"
                self._again.append(Sent(again, sent.allowed, sent.attempts + 1))
                return
            self.wrong.append(f"{sent.item.completion[:80]!r}: {result.failure.message[:200]}")
        else:
            self.outcomes[reward_pb2.Outcome.Name(result.score.outcome)] += 1
            if result.score.outcome not in sent.allowed:
                said = f"{reward_pb2.Outcome.Name(result.score.outcome)}: {result.score.reason[:200]}"
                self.wrong.append(f"{sent.item.completion[:80]!r} of {sent.item.reference.answer!r}: {said}")
        self.done += 1


def sample(server: psutil.Process) -> dict[str, int]:
    """Look at the service."""
    return {
        "rss": server.memory_info().rss,
        "threads": server.num_threads(),
        "fds": server.num_fds(),
        "processes": 1 + len(server.children(recursive=True)),
    }


def growth(samples: list[dict[str, int]]) -> dict[str, int]:
    """Return by how much the median of the last tenth of the samples exceeds that of the third; and the least RSS of
    the last three tenths that of the second to fourth.

    Megabyte answers under way make the others swing by tens of megabytes; what stays shows in the least.
    """
    tenth = max(len(samples) // 10, 1)
    early, late = samples[2 * tenth : 3 * tenth], samples[-tenth:]
    grown = {
        name: int(statistics.median(one[name] for one in late) - statistics.median(one[name] for one in early))
        for name in samples[0]
    }
    least = [min(one["rss"] for one in part) for part in (samples[tenth : 4 * tenth], samples[-3 * tenth :])]
    return {**grown, "least rss": least[1] - least[0]}


async def at_rest(server: psutil.Process) -> int:
    """Wait until ended processes have been reaped; return how many zombies stay."""
    end = time.monotonic() + REST_SECONDS
    while True:
        zombies = 0
        for child in server.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended while we looked
                zombies += child.status() == psutil.STATUS_ZOMBIE
        if not zombies or time.monotonic() > end:
            return zombies
        await asyncio.sleep(0.2)


async def soak(address: str, arguments: argparse.Namespace, code: bool) -> dict:
    server = psutil.Process(server_at("reward", address))
    async with connect(address) as channel:
        await channel.channel_ready()
        todo = items(arguments.items, code, random.Random(arguments.seed))
        run = Soak(reward_pb2_grpc.RewardServiceStub(channel), server, todo, arguments.items)
        began = time.monotonic()
        await run.run(arguments.in_flight)
        zombies = await at_rest(server)
    grown = growth(run.samples)
    return {
        "items": run.done,
        "seconds": round(time.monotonic() - began, 1),
        "code": code,
        "outcomes": dict(run.outcomes),
        "wrong": run.wrong[:10],
        "first": run.samples[0],
        "last": run.samples[-1],
        "grown": grown,
        "leaks": [name for name, allowed in ALLOWED.items() if grown[name] > allowed],
        "zombies": zombies,
        "tree": [server.pid, *(child.pid for child in server.children(recursive=True))],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Many mixed verifications; does the reward service leak?")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-code", action="store_true", help="leave out programs")
    arguments = parser.parse_args()
    code = not arguments.no_code
    if code:
        print(f"sandbox: {asyncio.run(check_sandbox(SandboxSection()))}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        with service("reward", Path(folder), SETTINGS) as address:
            said = asyncio.run(soak(address, arguments, code))
        said["left"] = [pid for pid in said.pop("tree") if psutil.pid_exists(pid)]
    said["ok"] = not (said["wrong"] or said["leaks"] or said["zombies"] or said["left"])
    print(json.dumps(said))
    return 0 if said["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
