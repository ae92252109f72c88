"""Checks a reward service for leaks with many mixed verifications: `make soak` (100,000), or fewer.

    .quartet/envs/dev/bin/python tests/soak/reward.py [--items 100000]

10% of the items are the hostile answers of tests/hostile; the others are right and wrong answers, simple ones and some
that need a worker, and programs with test cases. All are sent over one ScoreStream, eight per message. Every verdict
must be an allowed one; retryable failures are retried three times. The service's process is sampled every 2%: it leaks
if it grows by more than `ALLOWED`, if zombies remain, or if a descendant is left after its exit. The last line is JSON;
the exit status is 1 after a leak or a wrong verdict.
"""

import argparse
import asyncio
import contextlib
import itertools
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
from tests.hostile.answers import ANSWERS  # noqa: E402

# Threads: asyncio's pool that waits for processes grows up to this. The rest belongs to running work.
ALLOWED = {"rss": 24 << 20, "threads": (os.cpu_count() or 1) + 4, "fds": 8, "processes": 3}
# Caches are full long before the compared samples begin; memory may grow until then.
SETTINGS = [f"reward.{key}" for key in ("workers=2", "deadline_seconds=2", "max_queue=1024", "cache_bytes=1048576")]
A_MESSAGE, IN_FLIGHT = 8, 64
MOST_ATTEMPTS = 4

RIGHT = frozenset({reward_pb2.OUTCOME_CORRECT})
WRONG = frozenset({reward_pb2.OUTCOME_INCORRECT})
# On a busy machine an ordinary comparison may exceed this test's short deadline.
SLOW = frozenset({reward_pb2.OUTCOME_TIMED_OUT})


@dataclass(frozen=True)
class Sent:
    """An item and its allowed outcomes."""

    item: reward_pb2.ScoreItem
    allowed: frozenset[int]
    attempts: int = 1


def items(count: int, rng: random.Random) -> Iterator[Sent]:
    """Return distinct items."""
    for number in range(count):
        kind, right = rng.random(), rng.random() < 0.5
        verdict = RIGHT if right else WRONG
        told = number if right else number + 1
        if kind < 0.1:
            hostile = rng.choice(ANSWERS)
            yield Sent(item(number, hostile.completion, hostile.reference, "math"), hostile.allowed)
        elif kind < 0.2:
            completion = rf"\boxed{{\frac{{x}}{{x+{told + 1}}}}}"
            yield Sent(item(number, completion, rf"1-\frac{{{number + 1}}}{{x+{number + 1}}}", "math"), verdict | SLOW)
        elif kind < 0.3:
            program = f"```python\nprint(int(input()) {'+' if right else '-'} {number + 1})\n```"
            cases = [reward_pb2.TestCase(input=str(n), output=str(n + number + 1)) for n in (1, 2)]
            yield Sent(item(number, program, "", "code", test_cases=cases), verdict | SLOW)
        else:
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
    """A stream with a number of concurrent items."""

    def __init__(self, stub: reward_pb2_grpc.RewardServiceStub, server: psutil.Process, count: int):
        self._call = stub.ScoreStream()
        self._server, self._count = server, count
        self._todo = items(count, random.Random(0))
        self._in_flight: dict[str, Sent] = {}
        self._again: list[Sent] = []
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[dict[str, int]] = []

    async def run(self) -> None:
        """Send all items and check the results."""
        done, every = 0, max(self._count // 50, 1)
        while done < self._count:
            while len(self._in_flight) + A_MESSAGE <= IN_FLIGHT and (batch := self._next()):
                await self._call.write(reward_pb2.ScoreStreamRequest(items=[sent.item for sent in batch]))
            async with asyncio.timeout(300):
                message = await self._call.read()
            done += sum(map(self._is_done, message.results))
            if done // every > len(self.samples):
                self.samples.append(sample(self._server))
                print(f"{done} done {self.samples[-1]}", file=sys.stderr, flush=True)
        await self._call.done_writing()

    def _next(self) -> list[Sent]:
        batch, self._again = self._again[:A_MESSAGE], self._again[A_MESSAGE:]
        batch += itertools.islice(self._todo, A_MESSAGE - len(batch))
        self._in_flight |= {sent.item.item_id: sent for sent in batch}
        return batch

    def _is_done(self, result: reward_pb2.ScoreResult) -> bool:
        """Check a result; return False if its item is retried."""
        sent = self._in_flight.pop(result.item_id)
        if result.HasField("failure"):
            kind, right = reward_pb2.FailureKind.Name(result.failure.kind), False
            if result.failure.retryable and sent.attempts < MOST_ATTEMPTS:
                sent.item.item_id += "+"
                self._again.append(Sent(sent.item, sent.allowed, sent.attempts + 1))
                return False
        else:
            kind, right = reward_pb2.Outcome.Name(result.score.outcome), result.score.outcome in sent.allowed
        self.outcomes[kind] += 1
        if not right:
            self.wrong.append(f"{sent.item.completion[:80]!r} of {sent.item.reference.answer!r}: {result!s:.300}")
        return True


def sample(server: psutil.Process) -> dict[str, int]:
    """Return the service's memory in bytes, threads, descriptors and number of processes."""
    return {
        "rss": server.memory_info().rss,
        "threads": server.num_threads(),
        "fds": server.num_fds(),
        "processes": 1 + len(server.children(recursive=True)),
    }


def growth(samples: list[dict[str, int]]) -> dict[str, int]:
    """Return the median of the last tenth of the samples less that of the third tenth."""
    tenth = max(len(samples) // 10, 1)
    early, late = samples[2 * tenth : 3 * tenth], samples[-tenth:]
    return {
        name: int(statistics.median(one[name] for one in late) - statistics.median(one[name] for one in early))
        for name in samples[0]
    }


async def zombies_at_rest(server: psutil.Process) -> int:
    """Wait until exited processes are reaped; return the number of remaining zombies."""
    for _ in range(100):
        zombies = 0
        for child in server.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has exited
                zombies += child.status() == psutil.STATUS_ZOMBIE
        if not zombies:
            break
        await asyncio.sleep(0.2)
    return zombies


async def soak(address: str, count: int) -> dict:
    server = psutil.Process(server_at("reward", address))
    async with connect(address) as channel:
        await channel.channel_ready()
        run = Soak(reward_pb2_grpc.RewardServiceStub(channel), server, count)
        began = time.monotonic()
        await run.run()
        zombies = await zombies_at_rest(server)
    grown = growth(run.samples)
    return {
        "items": count,
        "seconds": round(time.monotonic() - began, 1),
        "outcomes": dict(run.outcomes),
        "wrong": run.wrong[:10],
        "first": run.samples[0],
        "last": run.samples[-1],
        "leaks": {name: by for name, by in grown.items() if by > ALLOWED[name]},
        "zombies": zombies,
        "tree": [server.pid, *(child.pid for child in server.children(recursive=True))],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Many mixed verifications; does the reward service leak?")
    parser.add_argument("--items", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with service("reward", Path(folder), SETTINGS) as address:
            said = asyncio.run(soak(address, arguments.items))
        said["left"] = [pid for pid in said.pop("tree") if psutil.pid_exists(pid)]
    print(json.dumps(said))
    return 1 if said["wrong"] or said["leaks"] or said["zombies"] or said["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
