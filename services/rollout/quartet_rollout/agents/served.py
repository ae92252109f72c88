"""Completions of a served environment: the environment service plays an episode against the endpoint for each one."""

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc
from quartet.v1 import environment_pb2, environment_pb2_grpc, experience_pb2

from quartet_common.diagnosis import Peer
from quartet_common.durations import to_duration, to_seconds
from quartet_common.errors import describe, retry_delay
from quartet_common.handshake import WaitingFor
from quartet_common.log import get_logger
from quartet_common.outage import Outage
from quartet_common.sampling import to_message
from quartet_rollout.agents.completions import SeatCompletion, seat_completions
from quartet_rollout.agents.episodes import AgentEpisode, Episodes
from quartet_rollout.environments.base import EnvironmentFailed
from quartet_rollout.generation import GenerationRequest
from quartet_rollout.metrics import ENVIRONMENT_SECONDS, EPISODES, TURNS

log = get_logger(__name__)

DEFAULT_SECONDS = 600.0
"""Time of an episode, the contract's default."""
_GRACE_SECONDS = 10.0
"""Of the call beyond the episode's own time: the service reports what took too long."""
_MOST_BREAKS = 3
"""Times that the service may end under an episode before its group is given back."""
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True)
class EpisodeTask:
    """Shared by the episodes of one prompt."""

    name: str
    """For logs: the lease's id."""
    run_id: str
    prompt: experience_pb2.Prompt
    environment: experience_pb2.EnvironmentSpec
    request: GenerationRequest
    traceparent: str

    @property
    def seconds(self) -> float:
        """Time that an episode has."""
        given = self.environment.HasField("answer_deadline")
        return to_seconds(self.environment.answer_deadline) if given else DEFAULT_SECONDS


class ServedEnvironments:
    """The environments of the environment service."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        peer: Peer,
        waiting: WaitingFor,
        episodes: Episodes,
        base_url: str,
        model: str,
    ):
        """`base_url`: of the endpoint, as the service reaches it; `model`: its name there."""
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        self._peer, self._waiting, self._base_url, self._model = peer, waiting, base_url, model
        self._awaited = f"environment service at {peer.address}"
        self._episodes = episodes

    async def play(self, task: EpisodeTask) -> AsyncGenerator[list[SeatCompletion], None]:
        """Yield the completions of each episode as it finishes.

        Raises EnvironmentFailed when one has no reward, or cannot be trained on; the others are cancelled.
        """
        playing = [asyncio.create_task(self._play_one(task, index)) for index in range(task.request.n)]
        try:
            for finished in asyncio.as_completed(playing):
                yield await finished
        finally:
            for one in playing:
                one.cancel()
            await asyncio.gather(*playing, return_exceptions=True)

    async def _play_one(self, task: EpisodeTask, index: int) -> list[SeatCompletion]:
        began = time.monotonic()
        try:
            with ENVIRONMENT_SECONDS.labels(task.environment.name).time():
                episode, response = await self._run(task, index)
            if response.WhichOneof("result") != "finished":
                failure = response.failure
                where = f" ({failure.place})" if failure.place not in failure.message else ""
                raise EnvironmentFailed(
                    f"episode {index}: {failure.message or 'it was answered with nothing'}{where}",
                    permanent=response.HasField("failure") and not failure.retryable,
                )
            played = seat_completions(episode, response.finished, index, time.monotonic() - began)
        except EnvironmentFailed:
            EPISODES.labels("failed").inc()
            raise
        EPISODES.labels("played").inc()
        TURNS.inc(len(episode.calls))
        return played

    async def _run(self, task: EpisodeTask, index: int) -> tuple[AgentEpisode, environment_pb2.RunEpisodeResponse]:
        """Have an episode played; again, as a new one, while the service is away."""
        outage, breaks = Outage(), 0
        settings, spec = task.request.settings, task.environment
        if spec.max_turn_tokens:
            settings = settings.model_copy(
                update={"max_new_tokens": min(settings.max_new_tokens, spec.max_turn_tokens)}
            )
        if settings.seed is not None:
            settings = settings.model_copy(update={"seed": settings.seed + index})
        while True:
            episode = self._episodes.open(settings, spec.max_turns or 8)
            request = environment_pb2.RunEpisodeRequest(
                episode_id=f"{task.name}/{index}",
                run_id=task.run_id,
                environment=spec,
                prompt=task.prompt,
                endpoint=environment_pb2.Endpoint(base_url=self._base_url, api_key=episode.key, model=self._model),
                sampling=to_message(settings),
                deadline=to_duration(task.seconds),
                index=index,
                traceparent=task.traceparent,
            )
            try:
                response = await self._stub.RunEpisode(request, timeout=task.seconds + _GRACE_SECONDS)
                self._waiting.discard(self._awaited)
                return episode, response
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AWAY:
                    raise _failed(error, index, task.seconds) from error
                breaks += episode.begun > 0  # it had begun to play
                if breaks >= _MOST_BREAKS:
                    raise EnvironmentFailed(
                        f"episode {index}: the environment service ended under it {breaks} times: {describe(error)}"
                    ) from error
                self._waiting.add(self._awaited)
                if outage.to_be_logged():
                    log.warning("episodes wait: %s", await self._peer.explain_aside(error))
                pause = retry_delay(error)
            finally:
                self._episodes.close(episode)
            await outage.wait(pause)


def _failed(error: grpc.aio.AioRpcError, index: int, seconds: float) -> EnvironmentFailed:
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            return EnvironmentFailed(describe(error), permanent=True)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return EnvironmentFailed(f"episode {index}: not played within {seconds:g} s")
        case _:
            return EnvironmentFailed(f"episode {index}: {describe(error)}")
