"""Verification of mathematical answers by the reward service, beside math-verify in one process.

    python benchmarks/reward.py [DATA]        (or DATA=folder in the environment)

Ours: a reward service process with one worker per core, called over gRPC in batches of 128, three concurrently, with
the `boxed` verifier. The service decides simple answers (numbers, closed forms, tuples, ...) exactly, its workers the
others.

Peer: math-verify's parse of the completion and of the reference, and verify, in this process, as in a training loop
that calls the library itself. The service's workers use the same library for answers that are not simple.

Three sets: simple numeric answers generated from a seed, half of them wrong; and answers equal to their reference, each
reference once, like GSM8K's and MATH-500's. With DATA, a folder as in docs/math.md, these are its references; without,
those of the small sample in tests/agreement/sample, repeated with other numbers. If a verdict is wrong (math-verify may
reject 1% of the equal ones), no figure is reported.

Then endless answers are killed at their deadline, while single items are scored. (Latencies of other calls are measured
by reward_service.py.)
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc
from math_verify import parse, verify
from measuring import ROOT, Figure, report, service
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.channel import connect_sync

BATCH = 128
BATCHES = 4
IN_FLIGHT = 3
ROUNDS = 3
DEADLINE_SECONDS = 1.0
ENDLESS = 8
SAMPLE = ROOT / "tests" / "agreement" / "sample"
MATH_VERIFY_MAY_REFUSE = 0.01

Items = list[tuple[reward_pb2.ScoreItem, bool]]


def item_of(index: int, completion: str, gold: str) -> reward_pb2.ScoreItem:
    """One item for `boxed`."""
    reference = reward_pb2.Reference(answer=gold)
    verifiers = [reward_pb2.VerifierSpec(name="boxed")]
    return reward_pb2.ScoreItem(item_id=str(index), completion=completion, reference=reference, verifiers=verifiers)


def plain_items(count: int) -> Items:
    """Items with numbers, and whether each is right."""
    rng = random.Random(0)
    items = []
    for index in range(count):
        price, number = rng.randint(2, 400), rng.randint(2, 90)
        answer = price * number / rng.choice([1, 1, 1, 2, 4])
        right = rng.random() < 0.5
        told = answer if right else answer + rng.randint(1, 20)
        completion = (
            f"<think>There are {number} boxes and each costs {price} dollars, so I multiply and divide what is left "
            f"among them.</think>She pays {number} times {price}. The answer is \\boxed{{{told:,.8g}}}."
        )
        items.append((item_of(index, completion, f"{answer:.8g}"), right))
    return items


def gold_items(golds: list[str]) -> Items:
    """Items whose answers are their references."""
    form = "<think>I work it out.</think>Putting all of it together, the answer is $\\boxed{{{}}}$."
    return [(item_of(i, form.format(gold), gold), True) for i, gold in enumerate(golds)]


def golds_of(data: Path | None) -> tuple[list[str], list[str]]:
    """GSM8K's and MATH-500's golds, or as many like them."""
    folder = data or SAMPLE
    gsm8k, math500 = (
        [json.loads(line)["answer"].rpartition("####")[2].strip() for line in (folder / path).read_text().splitlines()]
        for path in ("gsm8k/test.jsonl", "math/math500.jsonl")
    )
    if data is None:
        rng = random.Random(0)
        gsm8k = [str(rng.randint(0, 9999)) for _ in range(1000)]
        math500 = [varied(rng.choice(math500), rng) for _ in range(300)]
    return gsm8k, math500


def varied(gold: str, rng: random.Random) -> str:
    """The same form with other digits; what is a base, a power or a separator of thousands stays."""
    if any(sign in gold for sign in "_,^"):
        return gold
    return "".join(str(rng.randint(1, 9)) if sign.isdigit() and sign != "0" else sign for sign in gold)


def ours(stub: reward_pb2_grpc.RewardServiceStub, items: Items) -> list[bool]:
    """The service's verdicts."""
    batches = [[item for item, _ in items[start : start + BATCH]] for start in range(0, len(items), BATCH)]
    under_way: deque[grpc.Future] = deque()
    results = []
    for batch in batches:
        under_way.append(stub.Score.future(reward_pb2.ScoreRequest(items=batch), timeout=120))
        if len(under_way) == IN_FLIGHT:
            results += under_way.popleft().result().results
    results += [result for call in under_way for result in call.result().results]
    return [result.score.outcome == reward_pb2.OUTCOME_CORRECT for result in results]


def peers(items: Items) -> list[bool]:
    """Math-verify's verdicts, in this process."""
    return [bool(verify(parse(f"${item.reference.answer}$"), parse(item.completion))) for item, _ in items]


def timed(name: str, judge: Callable[[], list[bool]], items: Items, may_differ: float) -> float:
    """Return items/s of one pass. Raises RuntimeError if more than the share `may_differ` of the verdicts is wrong."""
    began = time.perf_counter()
    verdicts = judge()
    seconds = time.perf_counter() - began
    wrong = sum(found != right for found, (_, right) in zip(verdicts, items, strict=True))
    if wrong > may_differ * len(items):
        raise RuntimeError(f"{name}: {wrong} of {len(items)} items are judged wrongly")
    return len(items) / seconds


async def kill_endless_answers(address: str, items: Items) -> None:
    """Print how long endless answers took to be killed, and single items beside them."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)

        async def seconds_of(item: reward_pb2.ScoreItem) -> float:
            began = time.perf_counter()
            await stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=120)
            return time.perf_counter() - began

        endless = [item_of(i, rf"\boxed{{(10^{{9}}+{i})!}}", "8") for i in range(ENDLESS)]
        killing = asyncio.ensure_future(stub.Score(reward_pb2.ScoreRequest(items=endless), timeout=120))
        waits = []
        while not killing.done():
            waits.append(await seconds_of(items[len(waits) % len(items)][0]))
        elapsed = max(result.score.elapsed.ToTimedelta().total_seconds() for result in (await killing).results)
    hundredths = [1e3 * cut for cut in statistics.quantiles(waits, n=100)]
    print(f"beside {ENDLESS} endless answers: p50 {hundredths[49]:.1f} ms, p99 {hundredths[98]:.1f} ms of {len(waits)}")
    print(f"endless answers: killed after at most {elapsed:.3f} s; the deadline is {DEADLINE_SECONDS:g} s")
    if elapsed > DEADLINE_SECONDS + 0.2:
        raise RuntimeError("an answer took longer than its deadline and 0.2 s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=os.environ.get("DATA") or None)
    data = parser.parse_args().data
    gsm8k, math500 = golds_of(Path(data) if data else None)
    like = "" if data else ", made here"
    sets = {
        "reward: plain numeric answers": plain_items(BATCH * BATCHES),
        f"reward: GSM8K, answers equal to the reference{like}": gold_items(gsm8k),
        f"reward: MATH-500, answers equal to the reference{like}": gold_items(math500),
    }
    cores = len(os.sched_getaffinity(0))
    settings = [f"reward.workers={cores}", f"reward.deadline_seconds={DEADLINE_SECONDS}"]
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sets}
    for turn in range(ROUNDS):
        # A new service each time, because a service caches its verdicts.
        with (
            tempfile.TemporaryDirectory() as folder,
            service("reward", Path(folder), settings) as address,
            connect_sync(address) as channel,
        ):
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            ours(stub, [(item_of(i, rf"\boxed{{\sqrt{{x^{i}}}}}", f"x^{i}"), False) for i in range(4 * cores)])
            for name, items in sets.items():
                our_rate = timed(f"{name}, the service", partial(ours, stub, items), items, 0.0)
                peer_rate = timed(f"{name}, math-verify", partial(peers, items), items, MATH_VERIFY_MAY_REFUSE)
                rates[name].append((our_rate, peer_rate))
            if turn == ROUNDS - 1:
                asyncio.run(kill_endless_answers(address, list(sets.values())[2]))
    figures = []
    for name, pairs in rates.items():
        our_rate, peer_rate = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratio = our_rate / peer_rate
        print(f"{name}: {ratio:.1f} x math-verify in one process, {ratio / cores:.1f} x per core of {cores}")
        figures.append(Figure(name, "items/s", our_rate, peer_rate, "math-verify in one process", "higher"))
    report(*figures)


if __name__ == "__main__":
    main()
