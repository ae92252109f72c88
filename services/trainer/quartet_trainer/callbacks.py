"""Code of others that is called during a training: found by entry points, named in the run file.

`Starter` is what an entry point of the group `quartet.callbacks` gives; it makes a `Callback`, whose methods the
training calls. This module imports no torch, so that a run file can be checked without it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from quartet.v1 import experience_pb2

from quartet_common.config import ConfigError, Section
from quartet_common.log import get_logger
from quartet_common.plugins import install_command, load_plugins
from quartet_trainer.errors import TrainingError

log = get_logger(__name__)


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


# Their own axes, for W&B's step only ever rises: after a restart steps are told a second time, and an evaluation of a
# version may be complete when the next step is.
_STEP, _VERSION = "step", "policy_version"


class WandbParameters(Parameters):
    """What `wandb.init` is told; keys and servers are taken from its own environment variables (WANDB_API_KEY …)."""

    project: str = Field("quartet", min_length=1)
    mode: Literal["offline", "online"] = "offline"
    """offline: written below the run's folder, to be sent by `wandb sync` whenever that is wanted."""
    entity: str | None = None
    tags: list[str] = []


class WandbStarter:
    """Begins a run of W&B's, or goes on with the one of the same id."""

    name = "wandb"
    description = "Sends metrics of steps and evaluations to Weights & Biases."
    parameters = WandbParameters
    needs = ("wandb",)

    def start(self, training: TrainingFacts, parameters: WandbParameters) -> Callback:
        """Raises what W&B raises."""
        import wandb

        return _Sending(
            wandb.init(
                project=parameters.project,
                entity=parameters.entity,
                mode=parameters.mode,
                id=training.run_id,
                resume="allow" if parameters.mode == "online" else None,
                name=training.run_id,
                dir=training.folder,
                config={"trainer": dict(training.settings), "max_steps": training.max_steps},
                tags=parameters.tags,
                settings=wandb.Settings(silent=True, console="off"),  # the service's output is its log
            )
        )


class _Sending(Callback):
    def __init__(self, run: Any):
        self._run = run
        run.define_metric("*", step_metric=_STEP, step_sync=False)
        run.define_metric("eval/*", step_metric=_VERSION, step_sync=False)

    def on_update(self, update: UpdateEvent) -> None:
        self._log(update.metrics, _STEP, update.step)

    def on_evaluation(self, evaluation: EvaluationEvent) -> None:
        self._log(evaluation.metrics, _VERSION, evaluation.policy_version)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # Its own process writes what it was told, and may be late: after this, all is in the file.

    def _log(self, metrics: Mapping[str, float], axis: str, value: int) -> None:
        self._run.log({**metrics, axis: value})


ENTRY_POINT_GROUP = "quartet.callbacks"
_PARTS = ("name", "description", "parameters", "start")


class CallbackSection(Section):
    """One of [[trainer.callbacks]]."""

    name: str = Field(min_length=1, description="`wandb`, or a callback that an installed package brings.")
    parameters: dict[str, Any] = Field({}, description="Its parameters.")


def load_callbacks(points: Iterable[EntryPoint] | None = None) -> dict[str, Starter]:
    """Return all callbacks by name, in alphabetical order.

    Args:
        points: the entry points to load; by default those of the installed packages.

    Raises:
        ConfigError: an entry point cannot be loaded, is no callback, or takes a name that is taken.
    """
    return load_plugins("callback", ENTRY_POINT_GROUP, (WandbStarter(),), _PARTS, Parameters, points)


def check_callbacks(sections: Sequence[CallbackSection]) -> list[tuple[Starter, Parameters]]:
    """Return what `sections` name, with its parameters, in their order.

    Raises:
        ConfigError: there is no such callback, a package that it needs is not installed, or it does not take these
            parameters.
    """
    if not sections:
        return []
    known = load_callbacks()
    found = []
    for index, section in enumerate(sections):
        where = f"trainer.callbacks[{index}]"
        if section.name not in known:
            raise ConfigError(f"{where}.name: there is no callback '{section.name}'; there are: {', '.join(known)}")
        starter = known[section.name]
        if missing := [package for package in getattr(starter, "needs", ()) if find_spec(package) is None]:
            raise ConfigError(
                f"{where}: callback '{section.name}' needs {', '.join(missing)}, not installed here; install it: "
                f"{install_command(*missing)}"
            )
        try:
            found.append((starter, starter.parameters(**section.parameters)))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(str(part) for part in first["loc"])
            raise ConfigError(f"{where}.parameters of '{section.name}': {at}: {first['msg']}") from error
    return found


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
