"""The RPCs of RolloutService: validate requests, call the parts, build responses."""

import grpc
from quartet.v1 import broker_pb2, rollout_pb2, rollout_pb2_grpc

from quartet_common.durations import to_duration, to_seconds
from quartet_common.errors import describe, failed_precondition, invalid_argument, unavailable, unimplemented
from quartet_common.identity import check_owner, restricted
from quartet_common.log import get_logger
from quartet_common.weights import check_manifest
from quartet_rollout.broker import BrokerLink
from quartet_rollout.config import RolloutSection
from quartet_rollout.direct import DirectGeneration
from quartet_rollout.drain import Drain
from quartet_rollout.engines.base import PauseMode, WeightGroupInfo
from quartet_rollout.sleep import Sleep
from quartet_rollout.state import RolloutState
from quartet_rollout.weight_updates import WeightUpdates
from quartet_server.host import ServiceHost
from quartet_server.transports import RESERVED_NAMES

log = get_logger(__name__)

_TRANSPORTS: dict[int, str] = {
    rollout_pb2.WEIGHT_TRANSPORT_GLOO: "gloo",
    rollout_pb2.WEIGHT_TRANSPORT_NCCL: "nccl",
    rollout_pb2.WEIGHT_TRANSPORT_FILE: "file",
}
_PAUSE_MODES: dict[int, PauseMode] = {
    rollout_pb2.PAUSE_MODE_UNSPECIFIED: "keep",
    rollout_pb2.PAUSE_MODE_KEEP: "keep",
    rollout_pb2.PAUSE_MODE_WAIT: "wait",
    rollout_pb2.PAUSE_MODE_ABORT: "abort",
}
# Above any epoch or policy version of a run; and a day.
_MAX_VERSION = 2**31 - 1
_MAX_TIMEOUT_SECONDS = 86400.0


class RolloutServicer(rollout_pb2_grpc.RolloutServiceServicer):
    """Answers for one rollout."""

    def __init__(
        self,
        state: RolloutState,
        host: ServiceHost,
        section: RolloutSection,
        direct: DirectGeneration,
        link: BrokerLink,
        sleep: Sleep,
        drain: Drain,
        updates: WeightUpdates,
    ):
        self._state, self._host, self._section, self._link = state, host, section, link
        self._direct, self._sleep, self._drain, self._updates = direct, sleep, drain, updates
        self._trainer = ("", "")  # a run, and the identity of the trainer with its session, cached

    async def GetStatus(self, request, context):  # noqa: N802 (the contract's name)
        state = self._state
        response = rollout_pb2.RolloutServiceGetStatusResponse(
            run_id=state.run_id if state.run is not None else "",
            engine=self._section.engine,
            policy_version=state.policy_version,
            group_epoch=self._updates.epoch,
            newest_group_epoch=self._updates.newest_epoch,
            instance_id=state.instance_id,
            kv_cache_use=-1.0,
            tokens_per_second=state.tokens_per_second,
            paused=state.updating,
            waiting_for=list(self._host.waiting),
            groups_total=state.groups_total,
            sleep_level=state.sleep_level,
        )
        if state.engine is not None:
            stats = state.engine.stats()
            response.running, response.waiting = stats.running, stats.waiting
            response.kv_cache_use, response.tokens_total = stats.kv_cache_use, stats.tokens_total
            response.max_model_len = state.engine.max_model_len
        return response

    async def JoinWeightGroup(self, request, context):  # noqa: N802
        await self._check_call(request)
        transport = _transport_of(request)
        needs_store = transport in ("gloo", "nccl")
        if needs_store and not request.store_host:
            raise invalid_argument("store_host", "''", "the host of the group's TCPStore")
        if needs_store and not 1 <= request.store_port <= 65535:
            raise invalid_argument("store_port", request.store_port, "1 to 65535")
        if request.rank < 1:
            raise invalid_argument("rank", request.rank, "1 or more: the trainer is rank 0")
        for library, theirs in sorted(request.libraries.items()):
            ours = self._host.libraries.get(library)
            if ours != theirs:
                has = f"has {ours}" if ours else "does not have it"
                raise failed_precondition(
                    f"libraries.{library}",
                    f"the trainer has {theirs}, this rollout {has}: install {library} {theirs} here, or this "
                    "rollout's version at the trainer",
                )
        info = WeightGroupInfo(
            transport=transport,
            store_host=request.store_host,
            store_port=request.store_port,
            rank=request.rank,
            world_size=request.world_size,
            timeout_seconds=self._timeout(request.timeout),
            secret=request.secret,
            epoch=request.group_epoch,
            invitation=dict(request.invitation),
            interface=self._section.weight_interface,
        )
        return rollout_pb2.JoinWeightGroupResponse(ranks=await self._updates.join(info))

    async def BeginWeightUpdate(self, request, context):  # noqa: N802
        await self._check_call(request)
        if request.pause_mode not in _PAUSE_MODES:
            raise invalid_argument("pause_mode", request.pause_mode, ", ".join(rollout_pb2.PauseMode.keys()))
        if request.manifest.kind == rollout_pb2.WEIGHT_KIND_UNSPECIFIED:
            raise invalid_argument("manifest.kind", "WEIGHT_KIND_UNSPECIFIED", "WEIGHT_KIND_FULL or WEIGHT_KIND_LORA")
        if not request.manifest.tensors:
            raise invalid_argument("manifest.tensors", "none", "at least one tensor")
        try:
            check_manifest(request.manifest)
        except ValueError as error:
            raise invalid_argument("manifest", str(error), "a manifest that is consistent with itself") from error
        _policy_version(request)
        await self._updates.begin(request, _PAUSE_MODES[request.pause_mode], self._timeout(request.timeout))
        return rollout_pb2.BeginWeightUpdateResponse()

    async def FinishWeightUpdate(self, request, context):  # noqa: N802
        await self._check_call(request)
        version = _policy_version(request)
        paused = await self._updates.finish(request)
        return rollout_pb2.FinishWeightUpdateResponse(policy_version=version, paused=to_duration(paused))

    async def AbortWeightUpdate(self, request, context):  # noqa: N802
        await self._check_call(request)
        stands = await self._updates.abort(request.group_epoch, _policy_version(request), request.reason)
        return rollout_pb2.AbortWeightUpdateResponse(policy_version=stands)

    async def SetSleep(self, request, context):  # noqa: N802
        await self._check_trainer()
        seconds = _seconds(request.timeout, "unset for no limit")
        return rollout_pb2.SetSleepResponse(policy_version=await self._sleep.set(request.level, seconds))

    async def SetDrain(self, request, context):  # noqa: N802
        run = self._state.run  # or its last one
        check_owner(f"run '{self._state.run_id}'", run.made_by if run is not None else "")
        if not request.draining:
            return self._drain.end()
        return await self._drain.begin(_seconds(request.grace, "unset to give back at once", "grace"))

    async def Generate(self, request, context):  # noqa: N802
        completions = [completion async for completion in self._direct.completions(request)]
        completions.sort(key=lambda completion: completion.info.index)
        return rollout_pb2.GenerateResponse(completions=completions)

    async def GenerateStream(self, request, context):  # noqa: N802
        async for completion in self._direct.completions(request):
            yield rollout_pb2.GenerateStreamResponse(completion=completion)

    async def LogProbs(self, request, context):  # noqa: N802
        return await self._direct.log_probs(request)

    async def _check_call(self, request) -> None:
        """Reject a call about weights that is for another run, is not from its trainer, or comes before the engine is
        loaded."""
        if request.run_id != self._state.run_id:
            raise failed_precondition("run_id", f"{self._state.works_for}, the call is about '{request.run_id}'")
        await self._check_trainer()
        if not 0 <= request.group_epoch <= _MAX_VERSION:
            raise invalid_argument("group_epoch", request.group_epoch, f"0 to {_MAX_VERSION}")
        if self._state.engine is None:
            raise unavailable("engine", "it is still loading", retry_after_seconds=1.0)

    async def _check_trainer(self) -> None:
        """Reject callers that are not the trainer of this rollout's run. Queries the broker if the caller is not the
        cached one."""
        caller, run_id = restricted(), self._state.run_id
        if caller is None or not run_id or (run_id, caller.name) == self._trainer:
            return
        try:
            run = (await self._link.call(self._link.stub.GetRun, broker_pb2.GetRunRequest(run_id=run_id))).run
        except grpc.RpcError as error:
            raise unavailable(
                "broker", f"GetRun failed, so the trainer of run '{run_id}' is not known: {describe(error)}"
            ) from error
        check_owner(f"the training of run '{run_id}'", run.trained_by)
        self._trainer = run_id, run.trained_by

    def _timeout(self, duration) -> float:
        return _seconds(duration, "unset") or self._section.weight_update_timeout_seconds


def _seconds(timeout, unset: str, name: str = "timeout") -> float:
    seconds = to_seconds(timeout)
    if not 0 <= seconds <= _MAX_TIMEOUT_SECONDS:
        raise invalid_argument(name, f"{seconds:g} s", f"above 0 to {_MAX_TIMEOUT_SECONDS:g} s, or {unset}")
    return seconds


def _policy_version(request) -> int:
    if not 0 <= request.policy_version <= _MAX_VERSION:
        raise invalid_argument("policy_version", request.policy_version, f"0 to {_MAX_VERSION}")
    return request.policy_version


def _transport_of(request) -> str:
    """Return the name of an invitation's transport. Raises ContractError for none, or an unknown one."""
    if request.transport == rollout_pb2.WEIGHT_TRANSPORT_UNSPECIFIED:
        raise invalid_argument("transport", "WEIGHT_TRANSPORT_UNSPECIFIED", "a transport")
    if request.transport == rollout_pb2.WEIGHT_TRANSPORT_CUSTOM:
        if not request.transport_name or request.transport_name in RESERVED_NAMES:
            allowed = "the name of another package's transport, as the transport is WEIGHT_TRANSPORT_CUSTOM"
            raise invalid_argument("transport_name", f"'{request.transport_name}'", allowed)
        return request.transport_name
    if request.transport not in _TRANSPORTS:
        raise unimplemented("transport", "this rollout receives weights by GLOO, NCCL, FILE and CUSTOM")
    return _TRANSPORTS[request.transport]
