"""A rollout without a model, in this process: what it answers follows from the instance id alone, in the order leased.

So two runs get the same batches in the same order, however often one of them was interrupted (with max_staleness = 0,
where no more than a batch is ever under way).
"""

import random
import struct
import threading
from collections.abc import Sequence

import grpc
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, experience_pb2, tensor_pb2

from quartet_common.durations import to_duration

COMPLETIONS = 4
VOCABULARY = 128
AWAY_SECONDS = 0.1
CALL_SECONDS = 20.0
LEASE_WAIT_SECONDS = 1.0


def ints(rows: Sequence[Sequence[int]], code: str, dtype: int) -> tensor_pb2.RaggedTensor:
    """Rows of different length."""
    flat = [value for row in rows for value in row]
    data = struct.pack(f"<{len(flat)}{code}", *flat)
    return tensor_pb2.RaggedTensor(dtype=dtype, lengths=[len(row) for row in rows], data=data)


def floats(values: Sequence[float]) -> tensor_pb2.Tensor:
    """One number a completion."""
    return tensor_pb2.Tensor(
        dtype=tensor_pb2.DTYPE_FLOAT32, shape=[len(values)], data=struct.pack(f"<{len(values)}f", *values)
    )


def group_of(instance: experience_pb2.PromptInstance, version: int, attempt: int) -> experience_pb2.ExperienceGroup:
    """The group of an instance: random tokens and rewards, the same whenever it is made."""
    chance = random.Random(instance.instance_id)
    rows = [[chance.randrange(1, VOCABULARY) for _ in range(chance.randrange(4, 12))] for _ in range(COMPLETIONS)]
    rewards = [float(index % 2) if index < 2 else chance.random() for index in range(COMPLETIONS)]
    prompt = [chance.randrange(1, VOCABULARY) for _ in range(6)]
    tensors = experience_pb2.GroupTensors(
        prompt_token_ids=tensor_pb2.Tensor(
            dtype=tensor_pb2.DTYPE_INT32, shape=[len(prompt)], data=struct.pack(f"<{len(prompt)}i", *prompt)
        ),
        completion_token_ids=ints(rows, "i", tensor_pb2.DTYPE_INT32),
        rollout_log_probs=ints([[-4.5] * len(row) for row in rows], "f", tensor_pb2.DTYPE_FLOAT32),
        rewards=floats(rewards),
        temperatures=floats([1.0] * COMPLETIONS),
        truncated=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_UINT8, shape=[COMPLETIONS], data=bytes(COMPLETIONS)),
        version_spans=ints([[version, 0, len(row)] for row in rows], "q", tensor_pb2.DTYPE_INT64),
        format_acc=floats([1.0] * COMPLETIONS),
        ans_acc=floats([float(reward >= 0.5) for reward in rewards]),
    )
    header = experience_pb2.GroupHeader(
        instance_id=instance.instance_id,
        purpose=instance.purpose,
        min_policy_version=version,
        max_policy_version=version,
        completions=COMPLETIONS,
        completion_tokens=sum(map(len, rows)),
        attempt=attempt,
    )
    transcript = experience_pb2.GroupTranscript(instance=instance, prompt_text=instance.prompt.text)
    group = experience_pb2.ExperienceGroup(
        header=header, tensors=tensors.SerializeToString(), transcript=transcript.SerializeToString()
    )
    if instance.instance_id in INVALID:
        INVALID[instance.instance_id](group)
    return group


def cut_off(group: experience_pb2.ExperienceGroup) -> None:
    """Its tensors end too early."""
    group.tensors = group.tensors[:-9]


def unreadable(group: experience_pb2.ExperienceGroup) -> None:
    """Its transcript is none."""
    group.transcript = b"garbage"


def infinite(group: experience_pb2.ExperienceGroup) -> None:
    """A reward is infinite."""
    tensors = experience_pb2.GroupTensors.FromString(group.tensors)
    tensors.rewards.CopyFrom(floats([1.0, 0.0, float("inf"), 0.0]))
    group.tensors = tensors.SerializeToString()


def foreign(group: experience_pb2.ExperienceGroup) -> None:
    """A token is not in the vocabulary."""
    tensors = experience_pb2.GroupTensors.FromString(group.tensors)
    tensors.completion_token_ids.data = struct.pack("<i", VOCABULARY) + tensors.completion_token_ids.data[4:]
    group.tensors = tensors.SerializeToString()


INVALID = {f"invalid/{spoil.__name__}": spoil for spoil in (cut_off, unreadable, infinite, foreign)}
"""By instance id: what the producer does to their groups."""


class Producer:
    """Answers prompts in a thread until the run ends or `close`."""

    def __init__(self, stub: broker_pb2_grpc.BrokerServiceStub, run_id: str):
        self._stub = stub
        self._run_id = run_id
        self._closing = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="producer", daemon=True)

    def start(self) -> None:
        """Join the run and begin."""
        # Draining: the trainer sends it no weights, which it could not take.
        member = broker_pb2.Member(
            instance_id="producer",
            kind=common_pb2.SERVICE_KIND_ROLLOUT,
            address="127.0.0.1:1",
            state=broker_pb2.MEMBER_STATE_DRAINING,
        )
        self._stub.RegisterMember(broker_pb2.RegisterMemberRequest(run_id=self._run_id, member=member), timeout=10)
        self._thread.start()

    def close(self) -> None:
        """Stop."""
        self._closing.set()
        self._thread.join(10)

    def _insist(self, method, request):
        """Call, and again while Redis is away."""
        while True:
            try:
                return method(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or self._closing.wait(AWAY_SECONDS):
                    raise

    def _work(self) -> None:
        version = 0
        try:
            while not self._closing.is_set():
                request = broker_pb2.LeasePromptsRequest(
                    run_id=self._run_id,
                    holder="producer",
                    max_prompts=8,
                    wait=to_duration(LEASE_WAIT_SECONDS),
                    policy_version=version,
                )
                answer = self._insist(self._stub.LeasePrompts, request)
                version = answer.policy_version
                if answer.leases:
                    groups = [
                        broker_pb2.PutGroup(
                            lease_id=lease.lease_id, group=group_of(lease.instance, version, lease.attempt)
                        )
                        for lease in answer.leases
                    ]
                    put = broker_pb2.PutExperienceRequest(run_id=self._run_id, groups=groups)
                    self._insist(self._stub.PutExperience, put)
        except grpc.RpcError as error:
            # The run is over: nothing is leased any more, or whoever called `close` waits for no answer.
            if error.code() != grpc.StatusCode.FAILED_PRECONDITION and not self._closing.is_set():
                self.failure = error
