"""What the reward service costs beyond the scoring itself: gRPC's share, latency under load, CPU of a message.

Ours: a reward service process with one worker, called over gRPC on loopback with simple numeric answers and the
verifier `think_answer_tags`, whose scoring takes some tens of microseconds.

- Added at p50: the median of sequential single calls, less the median of the same scoring called as a function in this
  process. The limit is 1 ms.
- p50 and p99 with 2, 16 and 128 concurrent calls of one item each; the service and this client share the cores.
- CPU per item, client and service together, when a ScoreStream has eight items per message, as rollouts batch items
  that finish together, against one item per message.

If any verdict is wrong, no figure is reported.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from measuring import Figure, in_turn, report, server_at, service
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.channel import connect, connect_sync
from quartet_reward.math.equality import MathEquality
from quartet_reward.scoring import Scorer
from quartet_reward.verifiers.base import Tools
from quartet_reward.verifiers.registry import SpecReader, load_verifiers

CALLS = 400
ROUNDS = 5
SECONDS = 4.0
CONCURRENT = (2, 16, 128)
STREAMED = 4000
LIMIT_MS = 1.0


def make_item(number: int) -> reward_pb2.ScoreItem:
    """An item that is right if its number is even."""
    thought = "so many boxes at so much each, and what is left is divided among them. " * 8
    answer = number if number % 2 == 0 else number + 1
    return reward_pb2.ScoreItem(
        item_id=str(number),
        completion=f"<think>{thought}</think><answer>{answer}</answer>",
        reference=reward_pb2.Reference(answer=str(number)),
        verifiers=[reward_pb2.VerifierSpec(name="think_answer_tags")],
        run_id="benchmark",
    )


def check(result: reward_pb2.ScoreResult) -> None:
    """Raise RuntimeError if the verdict is wrong."""
    right = int(result.item_id) % 2 == 0
    if (result.score.outcome == reward_pb2.OUTCOME_CORRECT) != right or not result.HasField("score"):
        raise RuntimeError(f"a wrong verdict, there is nothing to measure: {result}")


def added_by_grpc(address: str) -> tuple[float, float]:
    """Return the medians of a call and of the scoring alone, in ms."""
    scorer = Scorer(SpecReader(load_verifiers()), Tools(MathEquality(None)))
    items = [make_item(number) for number in range(CALLS)]

    def median(work: Callable[[reward_pb2.ScoreItem], reward_pb2.ScoreResult]) -> float:
        taken = []
        for item in items:
            began = time.perf_counter()
            result = work(item)
            taken.append(time.perf_counter() - began)
            check(result)
        return 1000 * statistics.median(taken)

    with connect_sync(address) as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        return in_turn(
            lambda: median(lambda item: stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=60).results[0]),
            lambda: median(lambda item: scorer.begin(item, "item", item.ByteSize()).result),
            ROUNDS,
        )


async def latencies(stub: reward_pb2_grpc.RewardServiceStub, concurrent: int) -> tuple[float, float]:
    """Return p50 and p99 of concurrent calls in ms."""
    taken: list[float] = []
    end = time.perf_counter() + SECONDS

    async def caller(number: int) -> None:
        while time.perf_counter() < end:
            began = time.perf_counter()
            answer = await stub.Score(reward_pb2.ScoreRequest(items=[make_item(number)]), timeout=60)
            taken.append(time.perf_counter() - began)
            check(answer.results[0])

    async with asyncio.TaskGroup() as group:
        for number in range(concurrent):
            group.create_task(caller(number))
    cuts = statistics.quantiles(taken, n=100)
    return 1000 * cuts[49], 1000 * cuts[98]


async def stream(stub: reward_pb2_grpc.RewardServiceStub, a_message: int) -> None:
    """Send items by a stream and read all results."""
    items = [make_item(number) for number in range(STREAMED)]
    call = stub.ScoreStream(timeout=120)

    async def write() -> None:
        for start in range(0, len(items), a_message):
            if a_message == 1:
                await call.write(reward_pb2.ScoreStreamRequest(item=items[start]))
            else:
                await call.write(reward_pb2.ScoreStreamRequest(items=items[start : start + a_message]))
        await call.done_writing()

    writing = asyncio.create_task(write())
    seen = 0
    async for message in call:
        for result in message.results or (message.result,):
            check(result)
            seen += 1
    await writing
    if seen != STREAMED:
        raise RuntimeError(f"{seen} of {STREAMED} items were answered")


async def cpu_of(work: Callable[[], Awaitable[None]], server: int) -> float:
    """Return the microseconds of CPU that a streamed item costs, client and service together."""
    before = time.process_time() + cpu_seconds(server)
    await work()
    return 1e6 * (time.process_time() + cpu_seconds(server) - before) / STREAMED


def cpu_seconds(pid: int) -> float:
    """Return what a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def loaded(address: str) -> list[Figure]:
    """Measure what needs many calls at a time."""
    figures = []
    async with connect(address) as channel:
        async with asyncio.timeout(30):
            await channel.channel_ready()
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        for concurrent in CONCURRENT:
            p50, p99 = await latencies(stub, concurrent)
            figures.append(
                Figure(f"reward_service: p99 of {concurrent} calls at a time", "ms", p99, p50, "their p50", "lower")
            )
        server = server_at("reward", address)
        costs: dict[int, list[float]] = {1: [], 8: []}
        for _ in range(3):
            for a_message, measured in costs.items():
                measured.append(await cpu_of(lambda count=a_message: stream(stub, count), server))
        eight, one = (statistics.median(costs[count]) for count in (8, 1))
        figures.append(
            Figure("reward_service: CPU of an item, 8 a message", "us", eight, one, "one a message", "lower"),
        )
    return figures


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, service("reward", Path(folder), []) as address:
        call, alone = added_by_grpc(address)
        added = Figure("reward_service: added by gRPC at p50", "ms", call - alone, LIMIT_MS, "limit", "lower")
        report(added, *asyncio.run(loaded(address)))


if __name__ == "__main__":
    main()
