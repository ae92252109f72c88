"""A rollout and a trainer without a model: the load of the broker's benchmarks.

They call the broker as the services do: the rollout over one asyncio channel with several concurrent calls, the trainer
over one blocking channel, step by step. Groups are encoded from arrays and decoded to arrays.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from groups import COMPLETIONS, PER_COMPLETION, PER_TOKEN, Arrays
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import broker_pb2_grpc, common_pb2, experience_pb2, tensor_pb2

from quartet_common.channel import channel_options, connect_sync
from quartet_common.durations import to_duration
from quartet_common.tensors import decode, decode_ragged, encode
from quartet_server.wire import Bytes, put_experience, put_group, put_request

WAIT_SECONDS = 5.0
CALL_SECONDS = 30.0
HEARTBEAT_SECONDS = 5.0
SUBMIT_MOST = 1024  # instances in one call
PUT_BYTES = 6 << 20  # most of a put, as a rollout has it
NEWEST = (1 << 31) - 1  # the largest policy version, as these rollouts have no weights

_DTYPES = {
    np.dtype(np.int32): tensor_pb2.DTYPE_INT32,
    np.dtype(np.float32): tensor_pb2.DTYPE_FLOAT32,
    np.dtype(np.uint8): tensor_pb2.DTYPE_UINT8,
    np.dtype(np.int64): tensor_pb2.DTYPE_INT64,
}


# --- The payload ------------------------------------------------------------------------------------------------------


def encode_group(group: Arrays) -> bytes:
    """Return a group as a serialized GroupTensors."""
    lengths = group["lengths"].tolist()
    message = experience_pb2.GroupTensors()
    message.prompt_token_ids.CopyFrom(encode(group["prompt_token_ids"]))
    for name in PER_COMPLETION:
        getattr(message, name).CopyFrom(encode(group[name]))
    _put_rows(message.version_spans, group["version_spans"], [3] * len(lengths))
    for name in PER_TOKEN:
        _put_rows(getattr(message, name), group[name], lengths)
    return message.SerializeToString()


def _put_rows(field: tensor_pb2.RaggedTensor, flat: np.ndarray, lengths: list[int]) -> None:
    # In its place: a large message that is made first and put into another one is serialized and parsed on the way.
    field.dtype = _DTYPES[flat.dtype]
    field.lengths.extend(lengths)
    field.data = flat.tobytes()


def decode_group(tensors: bytes) -> experience_pb2.GroupTensors:
    """Return a group's arrays by name; those of tokens as one row per completion."""
    message = experience_pb2.GroupTensors.FromString(tensors)
    arrays = {name: decode(getattr(message, name)) for name in ("prompt_token_ids", *PER_COMPLETION)}
    arrays |= {name: decode_ragged(getattr(message, name)) for name in (*PER_TOKEN, "version_spans")}
    return arrays


def flatten(decoded: dict) -> Arrays:
    """Return a decoded group in its original form, for a comparison."""
    rows = (*PER_TOKEN, "version_spans")
    flat = {name: np.concatenate(decoded[name]) if name in rows else decoded[name] for name in decoded}
    return flat | {"lengths": np.array([len(row) for row in decoded["loss_mask"]], dtype=np.int64)}


# --- The run ----------------------------------------------------------------------------------------------------------


def create_run(address: str, run_id: str, groups_per_step: int, max_staleness: int, **limits: int) -> None:
    """Create a run whose queue accepts any number of prompts."""
    spec = pb.RunSpec(
        run_id=run_id,
        group_size=COMPLETIONS,
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        max_queued_prompts=1 << 30,
        **limits,
    )
    with connect_sync(address) as channel:
        broker_pb2_grpc.BrokerServiceStub(channel).CreateRun(pb.CreateRunRequest(spec=spec), timeout=CALL_SECONDS)


def submit(address: str, run_id: str, name: str, count: int) -> None:
    """Queue prompts called NAME/0, NAME/1, ..."""
    with connect_sync(address) as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        for start in range(0, count, SUBMIT_MOST):
            instances = [
                experience_pb2.PromptInstance(
                    instance_id=f"{name}/{index}",
                    prompt=experience_pb2.Prompt(prompt_id=str(index), text="What is 17 + 25?"),
                    purpose=experience_pb2.PURPOSE_TRAIN,
                )
                for index in range(start, min(count, start + SUBMIT_MOST))
            ]
            stub.SubmitPrompts(pb.SubmitPromptsRequest(run_id=run_id, instances=instances), timeout=CALL_SECONDS)


# --- The rollout ------------------------------------------------------------------------------------------------------


@dataclass
class Produced:
    """The result of a rollout."""

    first_put: float = 0.0  # time.monotonic(), the same clock for all processes of a machine
    groups: int = 0  # those that were too old included
    lease_seconds: list[float] = field(default_factory=list)  # of each LeasePrompts that was granted something


class Rollout:
    """Leases prompts and answers them, `in_flight` pairs of calls at a time, `per_call` groups each.

    Args:
        think: seconds from a lease to its put, the time that generation takes. None: none.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        name: str,
        per_call: int,
        in_flight: int,
        think: Callable[[], float] | None = None,
    ):
        # A separate connection: by default channels of one process share one.
        options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = broker_pb2_grpc.BrokerServiceStub(self._channel)
        self._put = put_experience(self._channel)
        self._run_id, self._name = run_id, name
        self._per_call, self._in_flight, self._think = per_call, in_flight, think
        self._member = pb.Member(
            instance_id=name,
            kind=common_pb2.SERVICE_KIND_ROLLOUT,
            address="127.0.0.1:1",
            state=pb.MEMBER_STATE_ACTIVE,
        )
        self._version = 0
        self._beats: asyncio.Task | None = None

    async def join(self) -> None:
        """Become a member of the run, and stay one."""
        request = pb.RegisterMemberRequest(run_id=self._run_id, member=self._member)
        answer = await self._stub.RegisterMember(request, timeout=CALL_SECONDS)
        self._version = answer.run.policy_version
        self._beats = asyncio.create_task(self._beat())

    async def leave(self) -> None:
        """Leave the run and close the channel."""
        if self._beats is not None:
            self._beats.cancel()
            await asyncio.gather(self._beats, return_exceptions=True)
        request = pb.LeaveMemberRequest(run_id=self._run_id, instance_id=self._name)
        await self._stub.LeaveMember(request, timeout=CALL_SECONDS)
        await self._channel.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._stub.Heartbeat(
                pb.HeartbeatRequest(run_id=self._run_id, member=self._member), timeout=CALL_SECONDS
            )

    async def produce(self, payload: Callable[[int], bytes], produced: Produced) -> None:
        """Lease prompts and put groups until cancelled.

        A prompt may be leased again: a delayed group may be too stale for its step.
        """
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._in_flight):
                tasks.create_task(self._work(payload, produced))

    async def _work(self, payload: Callable[[int], bytes], produced: Produced) -> None:
        while True:
            leases = await self._lease(self._per_call, produced)
            if not leases:
                continue
            if self._think is not None:
                await asyncio.sleep(self._think())
            produced.first_put = produced.first_put or time.monotonic()
            for request, count in self._requests(leases, payload):
                answer = await self._put(request, timeout=CALL_SECONDS)
                unexpected = set(answer.outcomes) - {pb.PUT_OUTCOME_ACCEPTED, pb.PUT_OUTCOME_STALE}
                if unexpected:
                    raise RuntimeError(f"groups were refused: {[pb.PutOutcome.Name(each) for each in unexpected]}")
                produced.groups += count

    def _requests(
        self, leases: Sequence[pb.PromptLease], payload: Callable[[int], bytes]
    ) -> Iterator[tuple[bytes, int]]:
        """Yield put requests for leases, each with its number of groups and at most about PUT_BYTES.

        Each is encoded after the previous one was sent, so that its data are still in the processor's cache.
        """
        first = self._answer(leases[0], payload(_number(leases[0])))
        puts = math.ceil(sum(map(len, first)) * len(leases) / PUT_BYTES)  # groups of a run are alike
        ends = [len(leases) * (n + 1) // puts for n in range(puts)]
        groups, begin = [first], 1
        for end in ends:
            groups += [self._answer(lease, payload(_number(lease))) for lease in leases[begin:end]]
            yield put_request(self._run_id, groups), len(groups)
            groups, begin = [], end

    async def _lease(self, wanted: int, produced: Produced) -> list[pb.PromptLease]:
        request = pb.LeasePromptsRequest(
            run_id=self._run_id,
            holder=self._name,
            max_prompts=wanted,
            wait=to_duration(WAIT_SECONDS),
            policy_version=NEWEST,
        )
        started = time.monotonic()
        answer = await self._stub.LeasePrompts(request, timeout=WAIT_SECONDS + CALL_SECONDS)
        if answer.leases:
            produced.lease_seconds.append(time.monotonic() - started)
        self._version = max(self._version, answer.policy_version)
        return list(answer.leases)

    def _answer(self, lease: pb.PromptLease, tensors: bytes) -> list[Bytes]:
        header = experience_pb2.GroupHeader(
            instance_id=lease.instance.instance_id,
            purpose=lease.instance.purpose,
            min_policy_version=self._version,
            max_policy_version=self._version,
            completions=COMPLETIONS,
            completion_tokens=COMPLETIONS * 614,
            attempt=lease.attempt,
            reward_mean=0.5,
            reward_std=0.5,
        )
        return put_group(lease.lease_id, header, tensors)


def _number(lease: pb.PromptLease) -> int:
    """Return the n of NAME/n, as `submit` called it."""
    return int(lease.instance.instance_id.rpartition("/")[2])


# --- The trainer ------------------------------------------------------------------------------------------------------


class Trainer:
    """Leases batches, has them decoded, marks them trained and commits every `commit_every` steps."""

    def __init__(self, address: str, run_id: str, commit_every: int, per_message: int):
        self._channel = connect_sync(address)
        self._stub = broker_pb2_grpc.BrokerServiceStub(self._channel)
        self._run_id, self._commit_every, self._per_message = run_id, commit_every, per_message
        self._step = 0
        self._epoch = 0
        self._asked: grpc.Call | None = None  # for this step's batch, before its turn

    def open(self) -> None:
        """Open the run's session."""
        request = pb.OpenSessionRequest(run_id=self._run_id, holder="trainer")
        self._epoch = self._stub.OpenSession(request, timeout=CALL_SECONDS).session_epoch

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()

    def consume(self, steps: int, take: Callable[[bytes], object]) -> float:
        """Train `steps` steps, all of them committed at the end. Return when that was, by time.monotonic().

        `take` gets the tensors of each group. Before a step is marked trained, the batch of the next is asked for, as
        the trainer service does with its `prefetch`.
        """
        end = self._step + steps
        while self._step < end:
            self._lease(take, ahead=self._step + 1 < end)
            place = {"run_id": self._run_id, "session_epoch": self._epoch}
            self._stub.MarkTrained(pb.MarkTrainedRequest(**place, step=self._step), timeout=CALL_SECONDS)
            self._step += 1
            if self._step % self._commit_every == 0 or self._step == end:
                self._stub.Commit(pb.CommitRequest(**place, step=self._step), timeout=CALL_SECONDS)
        return time.monotonic()

    def _ask(self, step: int) -> grpc.Call:
        request = pb.LeaseExperienceRequest(
            run_id=self._run_id,
            session_epoch=self._epoch,
            step=step,
            wait=to_duration(WAIT_SECONDS),
            max_groups_per_message=self._per_message,
        )
        return self._stub.LeaseExperience(request, timeout=WAIT_SECONDS + CALL_SECONDS)

    def _lease(self, take: Callable[[bytes], object], ahead: bool) -> None:
        while True:
            call, self._asked = self._asked or self._ask(self._step), None
            first = next(call)
            manifest = first.manifest
            if manifest.granted:
                if ahead:
                    self._asked = self._ask(self._step + 1)
                taken = self._read(call, take)
                if taken != len(manifest.instance_ids):
                    raise RuntimeError(f"step {self._step} has {taken} of {len(manifest.instance_ids)} groups")
                return
            if manifest.end_of_data or manifest.run_finished:
                raise RuntimeError(f"step {self._step} will never come: {manifest}")

    @staticmethod
    def _read(call: grpc.Call, take: Callable[[bytes], object]) -> int:
        """Take groups as they come: while one message is decoded the next is on its way. Return how many."""
        taken = 0
        for part in call:
            groups = part.groups.groups if part.WhichOneof("part") == "groups" else [part.group]
            for group in groups:
                take(group.tensors)
            taken += len(groups)
        return taken
