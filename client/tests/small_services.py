"""A reward service and a rollout whose answers are known beforehand, over real sockets."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from quartet.v1 import (
    experience_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    tensor_pb2,
)

from quartet_common.config import SecuritySection, ServerSection
from quartet_common.errors import failed_precondition
from quartet_server.host import ServiceHost


class SmallReward(reward_pb2_grpc.RewardServiceServicer):
    """Rewards 1 if the completion contains the answer; refuses an empty one."""

    async def Score(self, request, context):  # noqa: N802
        results = []
        for item in request.items:
            result = reward_pb2.ScoreResult(item_id=item.item_id)
            if not item.reference.answer:
                result.failure.message = "the reference answer is empty"
            else:
                result.score.reward = float(item.reference.answer in item.completion)
                result.score.outcome = reward_pb2.OUTCOME_CORRECT
                result.score.reason = "it is in the text"
            results.append(result)
        return reward_pb2.ScoreResponse(results=results)

    async def ListVerifiers(self, request, context):  # noqa: N802
        info = reward_pb2.VerifierInfo(name="exact", description="The answer, character by character.")
        return reward_pb2.ListVerifiersResponse(verifiers=[info])


class SmallRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Generates the prompt's own text, n times."""

    async def GetStatus(self, request, context):  # noqa: N802
        return rollout_pb2.RolloutServiceGetStatusResponse(run_id="demo", engine="echo", policy_version=4)

    async def Generate(self, request, context):  # noqa: N802
        if request.run_id not in ("", "demo"):
            raise failed_precondition("run_id", f"this rollout works for run 'demo', not for '{request.run_id}'")
        info = experience_pb2.CompletionInfo(text=request.prompt.text, tokens=2, turns=1)
        completion = rollout_pb2.GeneratedCompletion(
            info=info,
            token_ids=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[2], data=b"\x07\0\0\0\x08\0\0\0"),
            log_probs=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[2], data=b"\0\0\x80\xbf\0\0\0\0"),
        )
        if request.sampling_masks:  # of the first token all, of the second two
            counts, ids = b"\0\0\0\0\x02\0\0\0", b"\x06\0\0\0\x08\0\0\0"
            completion.sampling_mask_counts.CopyFrom(tensor_pb2.Tensor(dtype=2, shape=[2], data=counts))
            completion.sampling_mask_token_ids.CopyFrom(tensor_pb2.Tensor(dtype=2, shape=[2], data=ids))
        return rollout_pb2.GenerateResponse(completions=[completion] * max(1, request.prompt.sampling.n))


@contextmanager
def small_services() -> Iterator[dict[str, str]]:
    """Yield the addresses of both, which are served by a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def start(kind: str, add, servicer) -> ServiceHost:
        host = ServiceHost(kind, "127.0.0.1:0", SecuritySection(), ServerSection(metrics=False, drain_seconds=0.1))
        add(servicer, host.server)
        await host.start()
        return host

    hosts = {
        "reward": do(start("reward", reward_pb2_grpc.add_RewardServiceServicer_to_server, SmallReward())),
        "rollout": do(start("rollout", rollout_pb2_grpc.add_RolloutServiceServicer_to_server, SmallRollout())),
    }
    yield {kind: host.address for kind, host in hosts.items()}
    for host in hosts.values():
        do(host.drain())
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
