"""Creates the parts of the rollout, starts them, and stops them when the service drains."""

import asyncio
import copy
import importlib
import importlib.metadata
import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import grpc
from quartet.v1 import broker_pb2, reward_pb2, rollout_pb2_grpc

from quartet_common.channel import connect
from quartet_common.config import LoadedConfig, split_address
from quartet_common.diagnosis import Peer
from quartet_common.errors import describe
from quartet_common.log import get_logger
from quartet_rollout.agents.episodes import Episodes
from quartet_rollout.agents.served import ServedEnvironments
from quartet_rollout.broker import BrokerLink, Leases, UploadBatcher
from quartet_rollout.callbacks import Callbacks, load_callbacks
from quartet_rollout.concurrency import Concurrency
from quartet_rollout.config import RolloutSection
from quartet_rollout.direct import DirectAdmission, DirectGeneration
from quartet_rollout.drain import Drain
from quartet_rollout.endpoint.gate import Gate
from quartet_rollout.engines import EngineError, create_engine
from quartet_rollout.engines.base import UNKNOWN_VERSION, Engine
from quartet_rollout.environments import Environments, load_environments
from quartet_rollout.environments.conversation import AnswerWriter
from quartet_rollout.environments.tools import RewardTools
from quartet_rollout.groups import Groups, PromptLoop
from quartet_rollout.membership import Membership
from quartet_rollout.metrics import (
    GENERATED,
    KV_CACHE_USE,
    POLICY_VERSION,
    RUNNING,
    TOKENS_PER_SECOND,
    WAITING,
    WINDOW,
)
from quartet_rollout.prompts import PromptReader
from quartet_rollout.scoring import GroupScorer
from quartet_rollout.servicer import RolloutServicer
from quartet_rollout.sleep import Sleep
from quartet_rollout.stall import StallWatch
from quartet_rollout.state import RolloutState
from quartet_rollout.teachers import Teachers
from quartet_rollout.weight_updates import WeightUpdates
from quartet_server.host import ServiceHost

if TYPE_CHECKING:
    from quartet_rollout.endpoint.server import EndpointServer
    from quartet_rollout.engines.vllm_engine.engine import VllmEngine

log = get_logger(__name__)

_WEIGHTS = "weights from the trainer"
_SAMPLE_SECONDS = 1.0
_SMOOTHED_OVER = 3  # samples

# How long finished groups may take to upload when the rollout leaves a run.
_FLUSH_SECONDS = 5.0


class RolloutService:
    """One rollout."""

    def __init__(self, config: LoadedConfig[RolloutSection], host: ServiceHost):
        self._config, self._host = config, host
        section, addresses, security = config.section, config.addresses, config.security
        self._engine: Engine | None = None
        self.state = RolloutState(host.instance_id)
        self._broker_channel = connect(addresses.broker, security, service="broker")
        broker = Peer("broker", addresses.broker, security)
        self._link = BrokerLink(self._broker_channel, broker, host.waiting, section.rpc_timeout_seconds)
        self._uploads = UploadBatcher(self.state, self._link)
        self._reward_channel = connect(addresses.reward, security, service="reward")
        reward = Peer("reward", addresses.reward, security)
        self._scorer = GroupScorer(
            self.state, self._reward_channel, reward, host.waiting, section.scoring, self._verifier_raised
        )
        tools = RewardTools(self._reward_channel, section.scoring.timeout_seconds)
        self._environments = Environments(load_environments(config.run, section.environments), tools)
        self._endpoint: EndpointServer | None = None
        self._episodes = Episodes()
        self._environment_channel = connect(addresses.environment, security, service="environment")
        self._teachers = Teachers(config.run.teachers, security, host.waiting)
        self._callbacks = Callbacks(load_callbacks(section.callbacks), self._failed)
        self.groups = Groups(
            self.state,
            Leases(self.state, self._link),
            self._scorer,
            self._uploads,
            self._environments,
            Concurrency(section.max_running_completions, section.kv_cache_limit),
            self._served(),
            self._teachers,
            self._callbacks,
            self._failed,
        )
        self.membership = Membership(
            self.state,
            self._link,
            host,
            section.advertise_address or host.address,
            section.runs or [config.run.id],
            self._teachers.names,
            on_new_run=self._forget_run,
            on_run_ended=self._stop_work,
        )
        self.admission = DirectAdmission(self.state, self.groups.concurrency, section)
        self._direct = DirectGeneration(self.state, self.admission)
        self._loop = PromptLoop(self.state, self._link, self.groups, self.membership, self.admission, section)
        self._sleep = Sleep(self.state, host.spawn)
        self._stall = StallWatch(self.state, section.stall_seconds, self._engine_stalled)
        self.updates = WeightUpdates(self.state, self._sleep, self.groups, host.spawn)
        drain = Drain(self.state, self.groups, self.membership, host)
        parts = self._direct, self._link, self._sleep, drain, self.updates
        self._servicer = RolloutServicer(self.state, host, section, *parts)

    async def run(self) -> None:
        """Serve until the host stops."""
        host = self._host
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self._servicer, host.server)
        host.loading = "engine loading"
        host.on_drain(self._drain)
        self._loading = host.spawn(self._load(), "load engine")
        for work, name in ((self._measure, "measuring"), (self._stall.run, "stall watch")):
            host.spawn(work(), name)
        of_runs = (
            (self.membership.run, "membership"),
            (self._scorer.run, "scoring"),
            (self.groups.renew_leases, "lease renewal"),
            (self._uploads.run, "upload"),
            (self._loop.run, "prompt loop"),
        )
        for work, name in () if self._config.section.standalone else of_runs:
            host.spawn(work(), name)
        await host.run()

    async def _load(self) -> None:
        """Load the engine while the server answers; a failure logs one sentence and ends the service."""
        section = self._config.section
        try:
            # In a thread, because importing the engine's library takes seconds.
            engine = self._engine = await asyncio.to_thread(self._make_engine)
            await engine.start()
            if section.initial_version is not None or section.standalone:
                await engine.set_version(section.initial_version or 0)
        except EngineError as error:
            log.error("the engine could not be loaded: %s", error)
            self._host.stop("there is no engine", exit_code=1)
            return
        host = self._host
        host.capabilities.extend([f"engine.{section.engine}", *engine.capabilities()])
        host.capabilities.extend(f"environment.{name}" for name in self._environments.names)
        host.libraries.update(_libraries(nccl="weights.nccl" in host.capabilities))
        self._environments.writer = AnswerWriter(copy.deepcopy(engine.tokenizer()))
        self.state.reader = PromptReader(engine.tokenizer(), engine.max_model_len)
        self.state.engine = engine
        if section.http.address:
            try:
                await self._serve_endpoint(engine)
            except (EngineError, OSError) as error:
                log.error("the model endpoint could not be served: %s", error)
                self._host.stop("there is no model endpoint", exit_code=1)
                return
        self.state.changes.notify()
        await host.set_ready()
        log.info("engine loaded", extra={"engine": section.engine, "max_model_len": engine.max_model_len})

    def _served(self) -> ServedEnvironments | None:
        """Return the environment service's environments, which play against the model endpoint, if there is one."""
        http, config = self._config.section.http, self._config
        if not http.address:
            return None
        url = http.url or f"{'https' if config.security.tls else 'http'}://{http.address}"
        peer = Peer("environment", config.addresses.environment, config.security)
        return ServedEnvironments(
            self._environment_channel, peer, self._host.waiting, self._episodes, f"{url}/v1", http.model
        )

    async def _serve_endpoint(self, engine: Engine) -> None:
        """Begin to serve the model endpoint over the vLLM engine. Raises EngineError, OSError."""
        # vLLM's server takes seconds to import, in which the service would not answer; it brings uvicorn.
        await asyncio.to_thread(importlib.import_module, "vllm.entrypoints.launchers.api_server.app_state")
        from quartet_rollout.endpoint.openai_app import openai_app
        from quartet_rollout.endpoint.server import EndpointServer, listen

        http, config = self._config.section.http, self._config
        listening = listen(*split_address(http.address))
        app = await openai_app(cast("VllmEngine", engine), str(config.model.path), http)
        gate = Gate(app, self.state, self.admission, self._episodes, http.api_keys())
        self._endpoint = EndpointServer(listening, config.security, config.server.drain_seconds / 6)
        self._host.spawn(self._endpoint.run(gate), "model endpoint")
        log.info("model endpoint", extra={"address": http.address, "model": http.model})

    def _make_engine(self) -> Engine:
        section = self._config.section
        return create_engine(section.engine, str(self._config.model.path), section.engine_options)

    async def _measure(self) -> None:
        """Update the gauges, and whether the service waits for weights; stop the service when the engine has failed."""
        counted_at, counted = time.monotonic(), 0
        while True:
            if (engine := self.state.engine) is not None:
                if engine.failure:  # Also noticed while nothing is generated.
                    self._failed(engine.failure)
                stats = engine.stats()
                if (seconds := time.monotonic() - counted_at) >= _SAMPLE_SECONDS:
                    generated = stats.tokens_total - counted
                    GENERATED.labels(self.state.run_id).inc(generated)
                    rate = generated / seconds
                    self.state.tokens_per_second += (rate - self.state.tokens_per_second) / _SMOOTHED_OVER
                    counted_at, counted = time.monotonic(), stats.tokens_total
                RUNNING.set(stats.running)
                WAITING.set(stats.waiting)
                WINDOW.set(self.groups.concurrency.window)
                KV_CACHE_USE.set(stats.kv_cache_use)
                TOKENS_PER_SECOND.set(self.state.tokens_per_second)
                POLICY_VERSION.set(self.state.policy_version)
                if self.state.policy_version == UNKNOWN_VERSION:
                    self._host.waiting.add(_WEIGHTS)
                else:
                    self._host.waiting.discard(_WEIGHTS)
            await self.state.changes.wait(_SAMPLE_SECONDS)

    def _verifier_raised(self, failure: reward_pb2.Failure) -> None:
        """Log a verifier's crash, and report it to the run's events."""
        text = f"{failure.message}\n{failure.traceback}".rstrip()
        log.error("%s", failure.message, extra={"place": failure.place})
        self._host.spawn(self._notice("error", text), "notice")

    async def _notice(self, level: str, text: str) -> None:
        notice = broker_pb2.Notice(level=level, text=text, source=self._host.instance_id)
        event = broker_pb2.RunEvent(notice=notice)
        request = broker_pb2.ReportProgressRequest(run_id=self.state.run_id, event=event)
        try:
            await self._link.call_with_retry(self._link.stub.ReportProgress, request)
        except grpc.RpcError as error:
            log.info("the broker rejected a notice: %s", describe(error))

    def _failed(self, reason: str) -> None:
        self._host.stop(reason, exit_code=1)

    def _engine_stalled(self, reason: str) -> None:
        """End the service, whose drain gives the leases back; no completion under way is waited for."""
        log.error("the engine has stalled: %s", reason)
        self._direct.interrupt("its engine has stalled; ask another rollout")
        self._host.stop("the engine has stalled", exit_code=1)

    async def _stop_work(self, reason: str) -> None:
        """Upload finished groups and release the other leases, before this rollout leaves the run."""
        await self.groups.flush(timeout=_FLUSH_SECONDS)
        await self.groups.give_back_all(reason)

    async def _forget_run(self, reason: str) -> None:
        GENERATED.clear()
        self._direct.interrupt(reason)
        await self.updates.forget(reason)

    async def _drain(self) -> None:
        """Stop leasing, finish direct generation, upload finished groups, release the other leases, leave the run, and
        close."""
        self.state.draining = True
        self.state.changes.notify()
        left = self._config.server.drain_seconds
        answering = asyncio.create_task(self._direct.stop(left / 3), name="finish direct generation")
        await self._loop.stop(timeout=min(self._config.section.lease_wait_seconds, left / 3))
        await self.groups.flush(timeout=left / 6)
        await self.groups.give_back_all("the rollout stops", timeout=left / 6)
        self._callbacks.close()
        await self.membership.leave()
        with suppress(TimeoutError):  # an engine that has stalled leaves no weight group
            async with asyncio.timeout(left / 10):
                await self.updates.close()
        await answering
        if self._endpoint is not None:
            await self._endpoint.stop()
        self._loading.cancel()
        await asyncio.wait({self._loading})
        if self._engine is not None:
            await _close(self._engine, timeout=left / 5)
        channels = self._broker_channel, self._reward_channel, self._environment_channel
        await asyncio.gather(self._teachers.close(), *(channel.close() for channel in channels))


async def _close(engine: Engine, timeout: float) -> None:
    """Close the engine, within `timeout`: loading cannot be interrupted, and ends with the process."""
    try:
        async with asyncio.timeout(timeout):
            await engine.close()
    except TimeoutError:
        log.info("the engine did not close in time", extra={"seconds": timeout})


def _libraries(nccl: bool) -> dict[str, str]:
    """Return the library versions for the handshake; `nccl`: whether the engine can use it."""
    libraries = {}
    for name in ("torch", "transformers", "vllm"):
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if nccl:
        from quartet_weights.process_group import nccl_version  # it imports torch

        libraries["nccl"] = nccl_version()
    return libraries
