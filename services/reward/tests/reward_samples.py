"""Items for the tests, what becomes of them, and a running service."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.config import load_config
from quartet_reward.app import Resources, assemble
from quartet_reward.config import RewardSection
from quartet_reward.math.equality import MathEquality
from quartet_reward.sandbox.pool import Sandbox
from quartet_reward.scoring import Scorer, Scoring
from quartet_reward.verifiers.base import Tools
from quartet_reward.verifiers.registry import SpecReader, load_verifiers
from quartet_reward.workers.pool import WorkerPool
from quartet_server.host import ServiceHost

# Evaluating it would take longer than anyone waits: math-verify's own alarm does not always stop such answers.
ENDLESS = "(10^{9})!"


def spec(name: str, weight: float = 0.0, **parameters: Any) -> reward_pb2.VerifierSpec:
    """A verifier with its parameters."""
    struct = Struct()
    struct.update(parameters)
    return reward_pb2.VerifierSpec(name=name, weight=weight, parameters=struct)


def item(
    completion: str, answer: str = "8", verifier: str = "think_answer_tags", item_id: str = "a", **fields: Any
) -> reward_pb2.ScoreItem:
    """An item with one verifier without parameters, unless `verifiers` gives others."""
    fields.setdefault("verifiers", [spec(verifier)])
    return reward_pb2.ScoreItem(
        item_id=item_id, completion=completion, reference=reward_pb2.Reference(answer=answer), **fields
    )


def scorer(sandbox: Sandbox | None = None, verifiers: Mapping[str, Any] | None = None) -> Scorer:
    """What scores items where no mathematics needs a worker."""
    return Scorer(SpecReader(load_verifiers() if verifiers is None else verifiers), Tools(MathEquality(None), sandbox))


def begun(one: reward_pb2.ScoreItem, by: Scorer | None = None) -> Scoring:
    """An item's scoring as far as it goes in place."""
    return (by or scorer()).begin(one, "item", one.ByteSize())


def at_once(one: reward_pb2.ScoreItem, by: Scorer | None = None) -> reward_pb2.ScoreResult:
    """The result of an item that waits for nothing."""
    result = begun(one, by).result
    assert result is not None, "it waits"
    return result


async def result_of(one: reward_pb2.ScoreItem, by: Scorer) -> reward_pb2.ScoreResult:
    found = begun(one, by)
    return found.result or await found.finish()


def tagged(answer: str, thought: str = "2+3=5") -> str:
    """A completion in the form of think_answer_tags."""
    return f"<think>{thought}</think><answer>{answer}</answer>"


def hard(number: int = 1, **fields: Any) -> reward_pb2.ScoreItem:
    """A right answer that only a worker can compare with its reference; each number's is another."""
    shift = number + 1
    return item(tagged(rf"\frac{{x}}{{x+{shift}}}"), rf"1-\frac{{{shift}}}{{x+{shift}}}", **fields)


def program(source: str, cases: Any = (), **reference: Any) -> reward_pb2.ScoreItem:
    """A completion that ends in a program, with what tests it; `cases` are pairs of input and output."""
    return reward_pb2.ScoreItem(
        item_id="a",
        completion=f"Look:\n```python\n{source}\n```\nDone.",
        reference=reward_pb2.Reference(
            test_cases=[reward_pb2.TestCase(input=given, output=expected) for given, expected in cases], **reference
        ),
    )


async def judged(sandbox: Sandbox | None, one: reward_pb2.ScoreItem, **parameters: Any) -> reward_pb2.ScoreResult:
    """What the verifier `code` says of a program."""
    del one.verifiers[:]
    one.verifiers.append(spec("code", **parameters))
    return await result_of(one, scorer(sandbox))


async def until(condition: Callable[[], bool], seconds: float = 100.0) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


@dataclass
class Running:
    """A service under test, its parts, and a stub that speaks to it."""

    stub: reward_pb2_grpc.RewardServiceStub
    host: ServiceHost
    parts: Resources

    @property
    def pool(self) -> WorkerPool:
        return self.parts.mathematics


@asynccontextmanager
async def serving(*overrides: str, start: Callable[[Resources], None] | None = None) -> AsyncIterator[Running]:
    """One worker, the smallest queue; what is endless goes on until it is cancelled, unless `overrides` end it.

    `start`: starts what a test needs; by default everything.
    """
    config = load_config(
        "reward",
        RewardSection,
        overrides=[
            "addresses.reward=127.0.0.1:0",
            "reward.deadline_seconds=600",
            "reward.max_queue=1024",
            "server.drain_seconds=0.5",
            *overrides,
        ],
    )
    host = ServiceHost("reward", config.addresses.reward, config.security, config.server)
    resources = assemble(config, host)
    if start is None:
        await resources.start()
    else:
        start(resources)
    await host.start()
    async with grpc.aio.insecure_channel(host.address) as channel:
        try:
            yield Running(reward_pb2_grpc.RewardServiceStub(channel), host, resources)
        finally:
            await host.drain()
            await resources.close()
