"""The interface of a callback."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict
from quartet.v1 import experience_pb2


class Parameters(BaseModel):
    """Parameters of a callback, as the run file gives them. Unknown keys are refused; numbers must be finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The training that begins, or goes on from a checkpoint."""

    run_id: str
    folder: Path
    """The run's folder."""
    first_step: int
    """Optimizer steps in the weights it begins with: steps from here on may be told a second time after a restart."""
    max_steps: int
    """0: until the prompts end."""
    settings: Mapping[str, Any]
    """The section [trainer] as JSON, defaults filled in."""


@dataclass(frozen=True, slots=True)
class BatchEvent:
    """A batch that is about to be trained."""

    step: int
    """Its number, from 0."""
    groups: Sequence[experience_pb2.GroupTensors]
    headers: Sequence[experience_pb2.GroupHeader]
    """Of each group."""


@dataclass(frozen=True, slots=True)
class UpdateEvent:
    """A batch that has been trained, reported, and is on its way to the rollouts."""

    step: int
    """Its number, from 0; the weights now have policy version step + 1."""
    metrics: Mapping[str, float]
    """Those of metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class EvaluationEvent:
    """Evaluations of one policy version that are complete."""

    policy_version: int
    metrics: Mapping[str, float]
    """Of all sets: eval/{set}/…."""


class Callback:
    """What the training calls, in its own thread on rank 0, in order; it waits for the answer. Override what is wanted.

    An exception ends the training, with the callback's name in the sentence: a callback that may fail says so itself.
    """

    def on_episode(self, data_pass: int, step: int) -> None:
        """The batch of `step` is the first of this process with a group of this pass over the data, or a later one."""

    def on_batch(self, batch: BatchEvent) -> None:
        """A batch is about to be trained."""

    def on_update(self, update: UpdateEvent) -> None:
        """It has been."""

    def on_evaluation(self, evaluation: EvaluationEvent) -> None:
        """A policy version has been evaluated."""

    def close(self) -> None:
        """The training ends, for whatever reason; nothing is called after this."""


class Starter(Protocol):
    """What an entry point gives when it is called without arguments.

    It may have `needs`, the modules that `start` imports: a run is refused before the start where one is not installed.
    """

    name: str
    """By which run files name it."""
    description: str
    """One sentence."""
    parameters: type[Parameters]

    def start(self, training: TrainingFacts, parameters: Any) -> Callback:
        """Begin; `parameters` is of the class `parameters`."""
        ...
