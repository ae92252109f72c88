"""A rollout without a model, in this process: its groups are determined by the instance id, in the order leased.

Two runs therefore get the same batches in the same order, even if one was interrupted (with max_staleness = 0, at
most one batch is in progress).
"""

import random
import threading

import grpc
import numpy as np
from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2

from quartet_common.durations import to_duration
from quartet_common.tensors import Dtype, encode, encode_ragged
from quartet_contract.world import put_group, rollout

COMPLETIONS = 4
VOCABULARY = 64
AWAY_SECONDS = 0.1
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.NOT_FOUND)
CALL_SECONDS = 20.0
LEASE_WAIT_SECONDS = 1.0
INVALID = "invalid/infinite"
"""The instance whose group the trainer drops."""


def group_of(lease: broker_pb2.PromptLease, version: int) -> broker_pb2.PutGroup:
    """Return the group of a prompt: random tokens and rewards, determined by the instance id."""
    chance = random.Random(lease.instance.instance_id)
    rows = [
        np.array([chance.randrange(1, VOCABULARY) for _ in range(chance.randrange(4, 12))], np.int32)
        for _ in range(COMPLETIONS)
    ]
    rewards = np.array([0.0, 1.0, *(chance.random() for _ in range(COMPLETIONS - 2))], np.float32)
    prompt = np.array([chance.randrange(1, VOCABULARY) for _ in range(6)], np.int32)
    if lease.instance.instance_id == INVALID:
        rewards[2] = np.inf
    tensors = experience_pb2.GroupTensors(
        prompt_token_ids=encode(prompt),
        completion_token_ids=encode_ragged(rows, Dtype.DTYPE_INT32),
        rollout_log_probs=encode_ragged([np.full(row.size, -4.5, np.float32) for row in rows], Dtype.DTYPE_FLOAT32),
        rewards=encode(rewards),
        temperatures=encode(np.ones(COMPLETIONS, np.float32)),
        truncated=encode(np.zeros(COMPLETIONS, np.uint8)),
        version_spans=encode_ragged([np.array([version, 0, row.size]) for row in rows], Dtype.DTYPE_INT64),
        format_acc=encode(np.ones(COMPLETIONS, np.float32)),
        ans_acc=encode((rewards >= 0.5).astype(np.float32)),
    )
    put = put_group(lease, version, tensors.SerializeToString())
    put.group.header.completions, put.group.header.completion_tokens = COMPLETIONS, sum(row.size for row in rows)
    return put


class Producer:
    """Puts groups in a thread until the run ends or `close`; those of the step `last` only after `finish`."""

    def __init__(self, stub: broker_pb2_grpc.BrokerServiceStub, run_id: str, last: int):
        self._stub = stub
        self._run_id = run_id
        self._last = last
        self._closing, self._finishing = threading.Event(), threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="producer", daemon=True)

    def start(self) -> None:
        """Register with the run and start."""
        # A draining member gets no weights from the trainer; this one could not receive any.
        member = rollout("producer", state=broker_pb2.MEMBER_STATE_DRAINING)
        self._stub.RegisterMember(broker_pb2.RegisterMemberRequest(run_id=self._run_id, member=member), timeout=10)
        self._thread.start()

    def finish(self) -> None:
        """Put the groups of the last step."""
        self._finishing.set()

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        self._finishing.set()
        self._thread.join(10)

    def _insist(self, method, request):
        """Make a call, with retries while Redis is down or lacks the run."""
        while True:
            try:
                return method(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() not in _AWAY or self._closing.wait(AWAY_SECONDS):
                    raise

    def _work(self) -> None:
        version, wait = 0, to_duration(LEASE_WAIT_SECONDS)
        try:
            while not self._closing.is_set():
                request = broker_pb2.LeasePromptsRequest(
                    run_id=self._run_id, holder="producer", max_prompts=8, wait=wait, policy_version=version
                )
                answer = self._insist(self._stub.LeasePrompts, request)
                version = answer.policy_version
                if version >= self._last:
                    self._finishing.wait()
                if answer.leases:
                    groups = [group_of(lease, version) for lease in answer.leases]
                    put = broker_pb2.PutExperienceRequest(run_id=self._run_id, groups=groups)
                    self._insist(self._stub.PutExperience, put)
        except grpc.RpcError as error:
            # The run has ended, or `close` was called.
            if error.code() != grpc.StatusCode.FAILED_PRECONDITION and not self._closing.is_set():
                self.failure = error
