"""The log-probs that teachers give the tokens of a group, stored with it: a restarted trainer asks nobody again."""

import asyncio
from collections.abc import Mapping

import grpc
import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, rollout_pb2, rollout_pb2_grpc, tensor_pb2

from quartet_common.channel import connect
from quartet_common.config import SecuritySection, TeacherSection
from quartet_common.errors import describe, retry_delay
from quartet_common.handshake import WaitingFor
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_common.tensors import decode, decode_ragged, encode, encode_ragged

log = get_logger(__name__)

CALL_SECONDS = 120.0
"""Deadline of a call: one forward pass, after those that wait at the teacher."""
_AWAY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class TeacherFailed(Exception):
    """A teacher refused a completion; another call would be refused too."""


class Teachers:
    """The teachers of [run.teachers]."""

    def __init__(self, sections: Mapping[str, TeacherSection], security: SecuritySection, waiting: WaitingFor):
        self._channels = {
            name: connect(section.address, security, service="rollout")
            for name, section in sections.items()
            if section.address
        }
        self._addresses = {name: section.address for name, section in sections.items()}
        self._waiting = waiting

    @property
    def names(self) -> list[str]:
        """Those that have an address here."""
        return list(self._channels)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def judge(
        self,
        prompt: experience_pb2.Prompt,
        spec: broker_pb2.RunSpec,
        tensors: experience_pb2.GroupTensors,
        vocabulary: str,
    ) -> None:
        """Set `teacher_log_probs` of a group's rows; waits while the teacher is away, as long as the lease lasts.

        Args:
            prompt: which may name its teacher, one of the run's.
            spec: of a run whose teachers are all known here.
            vocabulary: the policy's `vocabulary_digest`.

        Raises:
            TeacherFailed: the teacher cannot judge a row.
        """
        name = prompt.teacher or spec.teachers[0]
        rows = decode_ragged(tensors.completion_token_ids)
        if tensors.HasField("prompts"):
            distinct = decode_ragged(tensors.prompts)
            prompts = [distinct[number] for number in decode(tensors.row_prompts)]
        else:
            prompts = [decode(tensors.prompt_token_ids)] * len(rows)
        calls = [
            asyncio.create_task(self._log_probs(name, prompt, row, vocabulary))
            for prompt, row in zip(prompts, rows, strict=True)
        ]
        try:
            found = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        tensors.teacher_log_probs.CopyFrom(encode_ragged(found, tensor_pb2.DTYPE_FLOAT32))

    async def _log_probs(self, name: str, prompt: np.ndarray, row: np.ndarray, vocabulary: str) -> np.ndarray:
        if not row.size:
            return np.empty(0, np.float32)
        request = rollout_pb2.LogProbsRequest(
            prompt_token_ids=encode(prompt), completion_token_ids=encode(row), vocabulary=vocabulary
        )
        stub = rollout_pb2_grpc.RolloutServiceStub(self._channels[name])
        awaited, outage = f"'{name}' at {self._addresses[name]}", Outage()
        try:
            while True:
                try:
                    response = await stub.LogProbs(request, timeout=CALL_SECONDS)
                    break
                except grpc.RpcError as error:
                    if error.code() not in _AWAY:
                        raise TeacherFailed(f"teacher {awaited}: {describe(error)}") from error
                    if outage.to_be_logged():
                        log.warning("teacher %s does not answer: %s", awaited, describe(error))
                    self._waiting.add(f"teacher {awaited}")
                    await outage.wait(retry_delay(error))
        finally:
            self._waiting.discard(f"teacher {awaited}")
        found = decode(response.log_probs)
        if found.shape != row.shape or found.dtype != np.float32 or not np.isfinite(found).all():
            raise TeacherFailed(f"teacher {awaited} gave {found.size} log-probs of {found.dtype} for {row.size} tokens")
        return found
