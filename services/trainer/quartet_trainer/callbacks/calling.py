"""The callbacks of a training, called one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

from quartet.v1 import experience_pb2

from quartet_common.log import get_logger
from quartet_trainer.callbacks.base import (
    BatchEvent,
    Callback,
    EvaluationEvent,
    Parameters,
    Starter,
    TrainingFacts,
    UpdateEvent,
)
from quartet_trainer.errors import TrainingError

log = get_logger(__name__)


class Callbacks:
    """All of a run's, in the order of the run file. Methods raise TrainingError where one of them fails."""

    def __init__(self, chosen: Sequence[tuple[Starter, Parameters]] = (), training: TrainingFacts | None = None):
        """Start them; those started already are closed if one cannot be."""
        self._running: list[tuple[str, Callback]] = []
        self._last_pass = -1
        try:
            for starter, parameters in chosen:
                begun = _guarded(starter.name, "start", starter.start, training, parameters)
                self._running.append((starter.name, begun))
        except TrainingError:
            self.close()
            raise

    def batch(
        self,
        step: int,
        tensors: Sequence[experience_pb2.GroupTensors],
        groups: Sequence[experience_pb2.ExperienceGroup],
    ) -> None:
        """A batch is about to be trained; a pass over the data may begin with it."""
        if not self._running:
            return
        transcripts = (experience_pb2.GroupTranscript.FromString(group.transcript) for group in groups)
        newest = max((transcript.instance.data_pass for transcript in transcripts), default=self._last_pass)
        if newest > self._last_pass:
            self._last_pass = newest
            self._call("on_episode", newest, step)
        self._call("on_batch", BatchEvent(step, tensors, [group.header for group in groups]))

    def update(self, step: int, metrics: dict[str, float]) -> None:
        """It has been trained and reported."""
        self._call("on_update", UpdateEvent(step, metrics))

    def evaluation(self, policy_version: int, metrics: dict[str, float]) -> None:
        """A policy version has been evaluated."""
        self._call("on_evaluation", EvaluationEvent(policy_version, metrics))

    def close(self) -> None:
        """End all of them; one that fails is logged, for the training is over."""
        while self._running:
            name, callback = self._running.pop()
            try:
                callback.close()
            except Exception as error:  # anything may be in there
                log.error(f"callback '{name}' failed in close: {type(error).__name__}: {error}")

    def _call(self, method: str, *arguments: Any) -> None:
        for name, callback in self._running:
            _guarded(name, method, getattr(callback, method), *arguments)


def _guarded(name: str, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:  # anything may be in there
        raise TrainingError(f"callback '{name}' failed in {what}: {type(error).__name__}: {error}") from error
