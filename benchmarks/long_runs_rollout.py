"""A rollout without a model for `long_runs.py`: `long_runs_rollout.py BROKER RUN` puts groups until it is ended."""

import asyncio
import sys

from broker_load import Produced, Rollout, encode_group
from groups import COMPLETIONS, make_groups
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import experience_pb2, reward_pb2

from quartet_server.wire import Bytes, put_group

DISTINCT = 16


class ShortGroups(Rollout):
    """A rollout with transcripts. It is draining, so that it is sent no weights."""

    def __init__(self, address: str, run_id: str):
        super().__init__(address, run_id, "rollout", per_call=16, in_flight=2)
        self._member.state = pb.MEMBER_STATE_DRAINING

    def _answer(self, lease: pb.PromptLease, tensors: bytes) -> list[Bytes]:
        header = experience_pb2.GroupHeader(
            instance_id=lease.instance.instance_id,
            purpose=lease.instance.purpose,
            min_policy_version=self._version,
            max_policy_version=self._version,
            completions=COMPLETIONS,
            completion_tokens=COMPLETIONS * 8,
            attempt=lease.attempt,
        )
        score = reward_pb2.Score(reward=1, outcome=reward_pb2.OUTCOME_CORRECT, parsed_answer="42")
        shown = [
            experience_pb2.CompletionInfo(index=n, text=f"17 + 25 is {n}, or 42", tokens=8, score=score)
            for n in range(COMPLETIONS)
        ]
        told = experience_pb2.GroupTranscript(instance=lease.instance, prompt_text="17 + 25?", completions=shown)
        return put_group(lease.lease_id, header, tensors, told.SerializeToString())


async def main(address: str, run_id: str) -> None:
    encoded = [encode_group(group) for group in make_groups("short", DISTINCT)]
    rollout = ShortGroups(address, run_id)
    await rollout.join()
    await rollout.produce(lambda number: encoded[number % DISTINCT], Produced())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
