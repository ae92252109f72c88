"""Prompts on their way to rollouts and back: SubmitPrompts, EndPrompts, LeasePrompts, RenewLeases, ReleaseLeases,
GetUnscored; evaluations of a stored set, at one policy version or of the live policy: StartEvaluation, GetEvaluation.
"""

import asyncio
import hashlib
import secrets
from collections import defaultdict
from dataclasses import dataclass
from weakref import WeakValueDictionary

import grpc
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys, scripts, validation
from quartet_broker.events import timestamp
from quartet_broker.metrics import PROMPTS_LEASED, SHARES_REACHED
from quartet_broker.notifier import Notifier, WaitQueue
from quartet_broker.runs import Runs
from quartet_broker.store import Store, Value
from quartet_broker.traces import trace_lease, trace_submit
from quartet_common.errors import (
    ContractError,
    aborted,
    already_exists,
    failed_precondition,
    invalid_argument,
    not_found,
    resource_exhausted,
)
from quartet_server.wire import Bytes

_QUEUE_RETRY_SECONDS = 1.0
_LONG_BYTES = 1 << 20
_ASK = 3  # index of the argument that makes submit_prompts a dry run
_UNSCORED = (b"QUEUED", b"LEASED", b"DEAD")  # completions stored of an instance in one of these states have no score
_PURPOSES = {number: name.removeprefix("PURPOSE_") for name, number in experience_pb2.Purpose.items()}


def content_of(instance: experience_pb2.PromptInstance) -> bytes:
    """Serialize an instance deterministically, without its trace context."""
    if instance.traceparent:
        traced, instance = instance, experience_pb2.PromptInstance()
        instance.CopyFrom(traced)
        instance.ClearField("traceparent")
    return instance.SerializeToString(deterministic=True)


def digest(content: bytes, evaluation_set: str = "") -> str:
    """Return a digest of an instance's content and of the evaluation set that it is submitted to."""
    hashed = hashlib.blake2b(content, digest_size=16)
    hashed.update(evaluation_set.encode())
    return hashed.hexdigest()


def purpose_name(purpose: experience_pb2.Purpose) -> str:
    """Return a purpose as Redis keeps it, e.g. "TRAIN"."""
    return _PURPOSES[purpose]


def _forgotten(run_id: str, instance_id: str) -> ContractError:
    return aborted(
        f"prompts of run '{run_id}'",
        f"'{instance_id}', which was submitted before, is not known: Redis was restored from an earlier state, or lost "
        "the end of its log; submit again from the first prompt on",
    )


def overflow(run_id: str, reply: list) -> ContractError:
    """Return the error for a script's reply OVERFLOW."""
    return resource_exhausted(
        f"prompts of run '{run_id}'",
        f"{reply[1]} bytes are kept and at most {reply[2]} may be (broker.max_prompt_bytes)",
        _QUEUE_RETRY_SECONDS,
    )


def _refuse_submission(run_id: str, request: broker_pb2.SubmitPromptsRequest, reply: list) -> None:
    """Raise the error for the script's reply if it is a refusal."""
    match reply[0]:
        case b"FORGOTTEN":
            raise _forgotten(run_id, request.follows_instance_id)
        case b"CONFLICT":
            raise already_exists("prompt instance", reply[1].decode(), "it was submitted before with other content")
        case b"ENDED":
            raise failed_precondition(f"run '{run_id}'", "its training prompts have ended (EndPrompts)")
        case b"TOO_MANY":
            raise invalid_argument(
                "instances",
                came=f"{len(request.instances)} of them",
                allowed=f"at most max_queued_prompts ({reply[1]})",
            )
        case b"OVERFLOW":
            raise overflow(run_id, reply)
        case b"SET_FULL":
            raise resource_exhausted(
                f"evaluation set '{request.evaluation_set}'",
                f"it has {reply[1]} prompts and at most {validation.MOST_EVALUATION_PROMPTS} are stored",
            )
        case b"FULL":
            description = f"{reply[1]} prompts wait and at most {reply[2]} may (max_queued_prompts)"
            raise resource_exhausted(f"queue of run '{run_id}'", description, _QUEUE_RETRY_SECONDS)


@dataclass(eq=False)
class _Asking:
    """A call of LeasePrompts under way."""

    request: broker_pb2.LeasePromptsRequest
    until: float
    """When it has waited long enough, by the event loop's clock."""
    recorded: bool = False
    """Whether Redis knows that it asks."""

    @property
    def milliseconds_left(self) -> int:
        return max(0, int(1000 * (self.until - asyncio.get_running_loop().time())))


class Prompts:
    """The queue of prompts and their leases."""

    def __init__(self, store: Store, notifier: Notifier, runs: Runs, answer_bytes: int):
        self._store = store
        self._answer_bytes = answer_bytes
        self._runs = runs
        self._notifier = notifier
        self._queues: WeakValueDictionary[tuple[str, int, str], WaitQueue] = WeakValueDictionary()
        self._asking: defaultdict[str, list[_Asking]] = defaultdict(list)

    async def submit(self, request: broker_pb2.SubmitPromptsRequest) -> broker_pb2.SubmitPromptsResponse:
        """Queue prompt instances, all or nothing."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("instances", request.instances, 1024)
        if request.evaluation_set:
            validation.name("evaluation_set", request.evaluation_set)
        seen: dict[str, str] = {}
        arguments: list[Value] = [
            request.evaluation_set,
            request.follows_instance_id,
            validation.MOST_EVALUATION_PROMPTS,
            "",
        ]
        for n, instance in enumerate(request.instances):
            validation.instance(f"instances[{n}]", instance, request.evaluation_set)
            content = validation.bounded(f"instances[{n}]", content_of(instance), self._answer_bytes)
            if len(content) <= _LONG_BYTES:
                fingerprint = digest(content, request.evaluation_set)
            else:  # not in the event loop, which serves other calls meanwhile
                fingerprint = await asyncio.to_thread(digest, content, request.evaluation_set)
            if seen.get(instance.instance_id, fingerprint) != fingerprint:
                raise invalid_argument(
                    f"instances[{n}].instance_id", came=repr(instance.instance_id), allowed="one content per id"
                )
            if instance.instance_id in seen:
                continue
            seen[instance.instance_id] = fingerprint
            trace_submit(run_id, instance)
            pinned = instance.pinned_version if instance.HasField("pinned_version") else -1
            arguments += [
                instance.instance_id,
                fingerprint,
                purpose_name(instance.purpose),
                pinned if pinned >= 0 else "",
                instance.data_pass,
                validation.stored(f"instances[{n}]", instance, self._answer_bytes) if instance.traceparent else content,
                instance.source,
                instance.prompt.prompt_id,
            ]
        if sum(len(each) for each in arguments if isinstance(each, bytes)) > _LONG_BYTES:
            # Redis serves one call at a time: do not send it megabytes that it would refuse.
            sizes = [len(each) if isinstance(each, bytes) else each for each in arguments]
            sizes[_ASK] = "ask"
            _refuse_submission(run_id, request, await self._store.run(scripts.SUBMIT_PROMPTS, run_id, *sizes))
        reply = await self._store.run(scripts.SUBMIT_PROMPTS, run_id, *arguments)
        _refuse_submission(run_id, request, reply)
        repeats = len(request.instances) - len(seen)
        return broker_pb2.SubmitPromptsResponse(accepted=reply[1], duplicates=reply[2] + repeats)

    async def end(self, request: broker_pb2.EndPromptsRequest) -> broker_pb2.EndPromptsResponse:
        """Record that no more training prompts will come."""
        run_id = validation.name("run_id", request.run_id)
        (word, *_) = await self._store.run(scripts.END_PROMPTS, run_id, request.follows_instance_id)
        if word == b"FORGOTTEN":
            raise _forgotten(run_id, request.follows_instance_id)
        return broker_pb2.EndPromptsResponse()

    async def lease(
        self, request: broker_pb2.LeasePromptsRequest, context: grpc.aio.ServicerContext
    ) -> broker_pb2.LeasePromptsResponse:
        """Grant prompts to a rollout, waiting for the first."""
        run_id = validation.name("run_id", request.run_id)
        validation.identifier("holder", request.holder)
        validation.integer("max_prompts", request.max_prompts, 1, 1024)
        validation.version("policy_version", request.policy_version, -1)
        until = validation.deadline("wait", request.wait, context)
        asking = _Asking(request, until)
        self._asking[run_id].append(asking)
        try:
            response = await self._wait_in(self._queue(run_id, request.policy_version, ""), run_id, asking, alone=False)
            is_refused = response.gate == broker_pb2.GATE_REASON_SHARE and not response.leases
            if is_refused and asking.milliseconds_left:
                # It waits alone, as the others may get something.
                queue = self._queue(run_id, request.policy_version, request.holder)
                response = await self._wait_in(queue, run_id, asking, alone=True)
            return response
        finally:
            self._asking[run_id].remove(asking)
            if not self._asking[run_id]:
                del self._asking[run_id]

    async def _wait_in(
        self, queue: WaitQueue, run_id: str, asking: "_Asking", alone: bool
    ) -> broker_pb2.LeasePromptsResponse:
        """Wait for a turn and for prompts; unless `alone`, leave the queue to others when the fair share is reached."""
        waited = queue.turn.locked() or alone
        try:
            async with asyncio.timeout_at(asking.until):
                await queue.turn.acquire()
        except TimeoutError:
            return queue.refusal or await self._query(run_id, asking, waited)
        try:
            return await self._query_until_granted(queue, run_id, asking, waited, alone)
        finally:
            queue.turn.release()

    def _queue(self, run_id: str, policy_version: int, holder: str) -> WaitQueue:
        """Return the queue of a run's rollouts with weights of this version, or of one that has its fair share."""
        queue = self._queues.get((run_id, policy_version, holder))
        if queue is None:
            queue = WaitQueue(self._notifier.waiter(run_id, "prompts"))
            self._queues[run_id, policy_version, holder] = queue
        return queue

    async def _query_until_granted(
        self, queue: WaitQueue, run_id: str, asking: "_Asking", waited: bool, alone: bool
    ) -> broker_pb2.LeasePromptsResponse:
        """Query until prompts are granted. New callers query immediately; waiting callers query when notified."""
        while not waited or await queue.waiter.wait(asking.until):
            queue.waiter.clear()
            try:
                response = await self._query(run_id, asking, waited)
            except BaseException:
                queue.waiter.notify()  # the next caller in the queue must query
                raise
            has_share = response.gate == broker_pb2.GATE_REASON_SHARE and not alone
            if response.leases or has_share or response.gate == broker_pb2.GATE_REASON_FINISHED:
                queue.waiter.notify()
                return response
            queue.refusal = response
            waited = True
        return queue.refusal or await self._query(run_id, asking, waited)

    async def _query(self, run_id: str, asking: "_Asking", waited: bool) -> broker_pb2.LeasePromptsResponse:
        request, nonce = asking.request, secrets.token_hex(8)
        arguments = [request.holder, request.max_prompts, request.policy_version, nonce, self._answer_bytes]
        arguments.append(asking.milliseconds_left)
        # Each is named once: a script that gets all of them takes longer the more wait for it.
        others = [other for other in self._asking[run_id] if not (other.recorded or other is asking)]
        for other in others:
            arguments += [other.request.holder, other.milliseconds_left]
        reply = await self._store.run(scripts.LEASE_PROMPTS, run_id, *arguments)
        if reply[0] == b"OK":
            for other in others:
                other.recorded = True
        if reply[0] == b"ENDED" and not waited:
            raise failed_precondition(f"run '{run_id}'", f"it is finished ({reply[1].decode()})")
        return self._granted(run_id, request.holder, reply)

    def _granted(self, run_id: str, holder: str, reply: list) -> broker_pb2.LeasePromptsResponse:
        if reply[0] == b"NOT_MEMBER":
            raise failed_precondition(f"member '{holder}'", "it is not registered, or its ttl has passed: register")
        if reply[0] == b"ENDED":
            return broker_pb2.LeasePromptsResponse(gate=broker_pb2.GATE_REASON_FINISHED)
        _, gate, version, expiry, *grants = reply
        expires_at = timestamp(expiry)
        response = broker_pb2.LeasePromptsResponse(policy_version=int(version))
        SHARES_REACHED.labels(run_id).inc(gate == b"SHARE")
        if gate:
            response.gate = broker_pb2.GateReason.Value(f"GATE_REASON_{gate.decode()}")
        for lease_id, attempt, prompt, entry, unscored in zip(*(grants[n::5] for n in range(5)), strict=True):
            lease = response.leases.add(lease_id=lease_id.decode(), attempt=attempt, expires_at=expires_at)
            lease.instance.ParseFromString(prompt)
            lease.unscored = bool(unscored)
            trace_lease(run_id, holder, lease, entry)
        PROMPTS_LEASED.labels(run_id).inc(len(response.leases))
        return response

    async def renew(self, request: broker_pb2.RenewLeasesRequest) -> broker_pb2.RenewLeasesResponse:
        """Extend leases until the run's ttl from now."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("lease_ids", request.lease_ids, validation.MOST_IDS, least=0)
        _, expiry, *lost = await self._store.run(scripts.RENEW_LEASES, run_id, *request.lease_ids)
        return broker_pb2.RenewLeasesResponse(lost=[lease.decode() for lease in lost], expires_at=timestamp(expiry))

    async def release(self, request: broker_pb2.ReleaseLeasesRequest) -> broker_pb2.ReleaseLeasesResponse:
        """Give prompts back before their lease ends."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("releases", request.releases, validation.MOST_IDS, least=0)
        arguments: list[Value] = []
        prefix, nonce = keys.prefix(run_id), secrets.token_hex(8)
        values: dict[str, Bytes] = {}
        for n, release in enumerate(request.releases):
            name = f"{nonce}-{n}" if release.unscored else ""
            if name:
                values[f"{prefix}payload:{name}"] = release.unscored
            permanent = "1" if release.permanent else "0"
            arguments += [release.lease_id, validation.reason(release.failure), permanent, name, len(release.unscored)]
        _, requeued, dead, hopeless, *lost = await self._store.run(
            scripts.RELEASE_LEASES, run_id, *arguments, values=values
        )
        await self._runs.end_hopeless(run_id, hopeless)
        return broker_pb2.ReleaseLeasesResponse(requeued=requeued, dead=dead, lost=[lease.decode() for lease in lost])

    async def unscored(self, request: broker_pb2.GetUnscoredRequest) -> broker_pb2.GetUnscoredResponse:
        """Return the stored completions of an instance whose verifier failed."""
        run_id = validation.name("run_id", request.run_id)
        prefix, kept = keys.prefix(run_id), None
        ((state, stored),) = await self._store.read([("HMGET", f"{prefix}i:{request.instance_id}", "state", "stored")])
        if state in _UNSCORED and stored is not None:
            (kept,) = await self._store.read([("GET", f"{prefix}payload:{stored.decode()}")])
        if kept is None:
            await self._store.run(scripts.LIST_MEMBERS, run_id)  # raises NOT_FOUND if there is no such run
            raise not_found("unscored group", request.instance_id, "no completions of it wait for a score")
        return broker_pb2.GetUnscoredResponse(unscored=kept)


class Evaluations:
    """Starts evaluations and returns their results."""

    def __init__(self, store: Store, notifier: Notifier, answer_bytes: int):
        self._store = store
        self._notifier = notifier
        self._answer_bytes = answer_bytes

    async def start(self, request: broker_pb2.StartEvaluationRequest) -> broker_pb2.StartEvaluationResponse:
        """Queue a stored set, pinned to a policy version or for whichever is live."""
        run_id = validation.name("run_id", request.run_id)
        evaluation_set = validation.name("evaluation_set", request.evaluation_set)
        version = request.policy_version
        if request.live:
            at = f"live-{validation.name('live', request.live)}"
        else:
            at = str(validation.version("policy_version", version))
        evaluation_id = f"{evaluation_set}@{at}"
        arguments: list[Value] = [evaluation_id, "" if request.live else version]
        for stored in await self._stored(run_id, evaluation_set):
            instance = experience_pb2.PromptInstance.FromString(stored)
            instance.instance_id = f"{instance.instance_id}@{at}"
            instance.evaluation_id = evaluation_id
            if not request.live:
                instance.pinned_version = version
            arguments += [instance.instance_id, digest(content_of(instance)), instance.SerializeToString()]
        if len(arguments) == 2:
            await self._store.run(scripts.LIST_MEMBERS, run_id)  # raises NOT_FOUND if there is no such run
            raise not_found("evaluation set", evaluation_set, "submit its prompts with PURPOSE_EVALUATE")
        reply = await self._store.run(scripts.START_EVALUATION, run_id, *arguments)
        if reply[0] == b"OVERFLOW":
            raise overflow(run_id, reply)
        if reply[0] == b"CONFLICT":
            raise already_exists("prompt instance", reply[1].decode(), "an evaluation needs this id for its own")
        return broker_pb2.StartEvaluationResponse(evaluation_id=evaluation_id, prompts=int(reply[1]))

    async def _stored(self, run_id: str, evaluation_set: str) -> list[bytes]:
        prefix = keys.prefix(run_id)
        (ids,) = await self._store.read([("LRANGE", f"{prefix}set:{evaluation_set}", 0, -1)])
        if not ids:
            return []
        return await self._store.read(("HGET", f"{prefix}i:{name.decode()}", "prompt") for name in ids)

    async def get(
        self, request: broker_pb2.GetEvaluationRequest, context: grpc.aio.ServicerContext
    ) -> broker_pb2.GetEvaluationResponse:
        """Return an evaluation's results, waiting until it is complete."""
        run_id = validation.name("run_id", request.run_id)
        until = validation.deadline("wait", request.wait, context)
        if ":" in request.evaluation_id:  # no evaluation has it; the key may be that of an evaluation's list
            came = repr(request.evaluation_id[:100])
            raise invalid_argument("evaluation_id", came, "StartEvaluationResponse.evaluation_id")
        key = f"{keys.prefix(run_id)}evaluation:{request.evaluation_id}"
        waiter = self._notifier.waiter(run_id, "evaluations")
        while True:
            waiter.clear()
            (prompts, dead), finished = await self._store.read(
                [("HMGET", key, "prompts", "dead"), ("LLEN", f"{key}:finished")]
            )
            if prompts is None:
                await self._store.run(scripts.LIST_MEMBERS, run_id)  # raises NOT_FOUND if there is no such run
                raise not_found(
                    "evaluation",
                    request.evaluation_id,
                    "it was not started (StartEvaluation), or newer ones fill broker.max_evaluation_bytes",
                )
            complete = finished + int(dead) >= int(prompts)
            if complete or not await waiter.wait(until):
                break
        response = broker_pb2.GetEvaluationResponse(
            complete=complete, prompts=int(prompts), finished=finished, dead=int(dead)
        )
        await self._add_results(run_id, key, response, request.summary_only)
        return response

    async def _add_results(
        self, run_id: str, key: str, response: broker_pb2.GetEvaluationResponse, summary_only: bool
    ) -> None:
        (ids,) = await self._store.read([("LRANGE", f"{key}:finished", 0, response.finished - 1)])
        if not ids:
            return
        (headers,) = await self._store.read([("HMGET", f"{key}:headers", *ids)])
        response.headers.extend(experience_pb2.GroupHeader.FromString(header) for header in headers)
        if summary_only:
            return
        result_keys = [f"{keys.prefix(run_id)}result:{name.decode()}" for name in ids]
        total = sum(await self._store.read(("STRLEN", result) for result in result_keys))
        if total > self._answer_bytes:
            raise resource_exhausted(
                f"evaluation '{key.rpartition(':')[2]}'",
                f"its transcripts have {total} bytes and an answer at most {self._answer_bytes}: ask with summary_only "
                "and fetch the transcripts with CollectResults",
            )
        (transcripts,) = await self._store.read([("MGET", *result_keys)])
        # A transcript that was deleted (RunSpec.result_ttl) is returned empty.
        response.transcripts.extend(transcript or b"" for transcript in transcripts)
