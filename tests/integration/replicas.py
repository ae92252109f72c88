"""A caller of reward services behind one name: `python replicas.py ADDRESS calls|streams N`; the number of answers."""

import asyncio
import sys
from collections.abc import AsyncIterator

from quartet.v1 import common_pb2, reward_pb2, reward_pb2_grpc

from quartet_common.channel import connect
from quartet_common.handshake import handshake

SECONDS = 60.0


def item(number: int) -> reward_pb2.ScoreItem:
    """Return an answer that a verifier finds right."""
    verifiers = [reward_pb2.VerifierSpec(name="exact", weight=1.0)]
    return reward_pb2.ScoreItem(
        item_id=str(number), completion="7", reference=reward_pb2.Reference(answer="7"), verifiers=verifiers
    )


async def calls(address: str, count: int) -> int:
    """Score one item after another over one channel; return how many were right."""
    right = 0
    async with connect(address, service="reward") as channel:
        stub = reward_pb2_grpc.RewardServiceStub(channel)
        for number in range(count):
            answer = await stub.Score(reward_pb2.ScoreRequest(items=[item(number)]), timeout=SECONDS)
            right += sum(result.score.outcome == reward_pb2.OUTCOME_CORRECT for result in answer.results)
    return right


async def streams(address: str, count: int) -> int:
    """Score an item by a stream of each channel, after a handshake, as a rollout does; return how many were right."""

    async def items(number: int) -> AsyncIterator[reward_pb2.ScoreStreamRequest]:
        yield reward_pb2.ScoreStreamRequest(item=item(number))

    right = 0
    for number in range(count):
        async with connect(address, service="reward") as channel:
            await handshake(channel, common_pb2.SERVICE_KIND_ROLLOUT)
            call = reward_pb2_grpc.RewardServiceStub(channel).ScoreStream(items(number), timeout=SECONDS)
            right += [each.result.score.outcome async for each in call] == [reward_pb2.OUTCOME_CORRECT]
    return right


if __name__ == "__main__":
    ask = {"calls": calls, "streams": streams}[sys.argv[2]]
    print(asyncio.run(ask(sys.argv[1], int(sys.argv[3]))))
