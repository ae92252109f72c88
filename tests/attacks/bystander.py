"""Somebody who makes ordinary calls to each service all the time: `python bystander.py RUN '{"broker": …}'`.

Prints a line for each call, until it is ended: when it began (time.monotonic), of which kind, seconds, status code.
"timer" is no call: by how much the process itself is woken late, which is in every other figure too.
"""

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable

import grpc
from quartet.v1 import broker_pb2, broker_pb2_grpc, reward_pb2, reward_pb2_grpc, trainer_pb2, trainer_pb2_grpc
from quartet.v1 import rollout_pb2 as rollout
from quartet.v1 import rollout_pb2_grpc as rollout_grpc

from quartet_common.channel import connect

PAUSE_SECONDS = 0.03
DEADLINE_SECONDS = 20.0


async def main(run_id: str, addresses: dict[str, str]) -> None:
    """Call."""
    broker = broker_pb2_grpc.BrokerServiceStub(connect(addresses["broker"]))
    reward = reward_pb2_grpc.RewardServiceStub(connect(addresses["reward"]))
    engine = rollout_grpc.RolloutServiceStub(connect(addresses["rollout"]))
    trainer = trainer_pb2_grpc.TrainerServiceStub(connect(addresses["trainer"]))
    item = reward_pb2.ScoreItem(
        item_id="a",
        completion="<think>1</think><answer>2</answer>",
        reference=reward_pb2.Reference(answer="2"),
        verifiers=[reward_pb2.VerifierSpec(name="think_answer_tags")],
    )
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "broker": lambda: broker.GetRun(broker_pb2.GetRunRequest(run_id=run_id), timeout=DEADLINE_SECONDS),
        "reward": lambda: reward.Score(reward_pb2.ScoreRequest(items=[item]), timeout=DEADLINE_SECONDS),
        "rollout": lambda: engine.GetStatus(rollout.RolloutServiceGetStatusRequest(), timeout=DEADLINE_SECONDS),
        "trainer": lambda: trainer.GetStatus(trainer_pb2.TrainerServiceGetStatusRequest(), timeout=DEADLINE_SECONDS),
    }
    await asyncio.gather(_wake(), *(_repeat(kind, call) for kind, call in calls.items()))


async def _repeat(kind: str, call: Callable[[], Awaitable[object]]) -> None:
    while True:
        began, code = time.monotonic(), "OK"
        try:
            await call()
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        print(began, kind, time.monotonic() - began, code, flush=True)
        await asyncio.sleep(PAUSE_SECONDS)


async def _wake() -> None:
    while True:
        began = time.monotonic()
        await asyncio.sleep(PAUSE_SECONDS)
        print(began, "timer", time.monotonic() - began - PAUSE_SECONDS, "OK", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
