"""Slots of the sandbox go to runs in turn, and waiting for one is never held against a program."""

import asyncio
import time

import pytest
from quartet.v1 import reward_pb2
from reward_samples import spec, until

from quartet_reward.errors import VerifierFailure
from quartet_reward.fair_sandbox import FairSandbox
from quartet_reward.math.equality import MathEquality
from quartet_reward.sandbox.api import Ending, Execution, Job, SandboxUnavailable
from quartet_reward.scoring import Scorer
from quartet_reward.verifiers.base import Tools
from quartet_reward.verifiers.registry import SpecReader, load_verifiers


class SlowSandbox:
    """Every execution takes `seconds`, of which the program says that it took a hundredth, and prints its input.

    Nothing runs while `free` is not set.
    """

    mode = "test"

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.running = self.most = 0
        self.free = asyncio.Event()
        self.free.set()

    async def run(self, job: Job) -> Execution:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.free.wait()
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1
        return Execution(Ending.EXITED, 0, None, job.stdin, b"", b"", 0.0, self.seconds / 100, 0, self.mode)

    async def run_judged(self, judge: Job, candidate: Job) -> tuple[Execution, Execution]:
        return await self.run(judge), await self.run(candidate)

    async def close(self) -> None:
        pass


async def test_waiting_for_a_slot_is_no_time_of_the_programs():
    inner = SlowSandbox(0.1)
    sandbox = FairSandbox(inner, 2, 60.0)
    scorer = Scorer(SpecReader(load_verifiers()), Tools(MathEquality(None), sandbox))
    cases = [reward_pb2.TestCase(input=str(i), output=str(i)) for i in range(5)]
    item = reward_pb2.ScoreItem(
        item_id="a",
        completion="```python\nprint(input())\n```",
        reference=reward_pb2.Reference(test_cases=cases),
        verifiers=[spec("code", total_seconds=0.2)],
    )
    inner.free.clear()
    busy = [asyncio.create_task(sandbox.run(Job("script", b""))) for _ in range(10)]
    await asyncio.sleep(0)
    began = time.perf_counter()
    scoring = asyncio.create_task(scorer.score(item, "item", item.ByteSize()).run())
    await until(lambda: sandbox.waiting == 9)
    waits = time.perf_counter()
    await asyncio.sleep(0.5)
    waited = time.perf_counter() - waits
    inner.free.set()
    result = await scoring
    taken, elapsed = time.perf_counter() - began, result.score.elapsed.ToMilliseconds() / 1000
    assert result.score.outcome == reward_pb2.OUTCOME_CORRECT, result
    # What it needed itself is what is told, however long it waited and however slow the machine.
    assert 0.4 <= elapsed <= taken - waited, (elapsed, taken, waited)
    await asyncio.gather(*busy)
    assert inner.most == 2


async def test_no_slot_is_a_failure_and_never_a_verdict():
    sandbox = FairSandbox(SlowSandbox(5.0), 2, 0.05)
    busy = [asyncio.create_task(sandbox.run(Job("script", b""))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(SandboxUnavailable, match="no slot became free"):
        await sandbox.run_judged(Job("judge", b""), Job("candidate", b""))
    waiting = asyncio.create_task(sandbox.run(Job("script", b"")))
    await asyncio.sleep(0)
    await sandbox.close()
    with pytest.raises(VerifierFailure) as caught:
        await waiting
    assert caught.value.kind == reward_pb2.FAILURE_KIND_SHUT_DOWN
    for task in busy:
        task.cancel()
