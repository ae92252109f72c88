"""Callbacks: code of other packages that is called during training, found by entry points and named in the run file.

An entry point of the group `quartet.callbacks` names a `Starter`, which creates a `Callback`, whose methods the
training calls. This module imports no torch, so that a run file can be checked without it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field
from quartet.v1 import experience_pb2

from quartet_common.config import ConfigError
from quartet_common.log import get_logger
from quartet_common.python_file import FileError, install_command, load_callable
from quartet_common.sections import FunctionPath, PluginSection
from quartet_server.plugins import load_plugins, read_parameters
from quartet_trainer.errors import TrainingError

log = get_logger(__name__)


class Parameters(BaseModel):
    """A callback's parameters from the run file. Unknown keys are refused; numbers must be finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """The training that starts, or resumes from a checkpoint."""

    run_id: str
    folder: Path
    """The run's folder."""
    first_step: int
    """Optimizer steps in its first weights. After a restart, steps from here on may be reported a second time."""
    max_steps: int
    """0: no limit."""
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
    """A batch that has been trained and reported; its weights are being sent to the rollouts."""

    step: int
    """Its number, from 0; the weights now have policy version step + 1."""
    metrics: Mapping[str, float]
    """As in metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class EvaluationEvent:
    """Evaluations of one policy version that are complete."""

    policy_version: int
    metrics: Mapping[str, float]
    """Of all sets: eval/{set}/…."""


@dataclass(frozen=True, slots=True)
class SamplesEvent:
    """Some groups of a batch that has been trained, as in the run's samples/."""

    step: int
    groups: Sequence[experience_pb2.GroupTranscript]


class Callback:
    """Its methods are called on rank 0's training thread, which blocks meanwhile. Override those that you need.

    An exception ends the training; a callback that may fail must catch its own.
    """

    def __init__(self, training: TrainingFacts):
        self.training = training

    def on_episode(self, data_pass: int, step: int) -> None:
        """The batch of `step` is the first in this process with a group of `data_pass`, and none of a later pass."""

    def on_batch(self, batch: BatchEvent) -> None:
        """A batch is about to be trained."""

    def on_update(self, update: UpdateEvent) -> None:
        """A batch has been trained."""

    def on_samples(self, samples: SamplesEvent) -> None:
        """Samples were written; every `trainer.samples_interval` steps."""

    def on_evaluation(self, evaluation: EvaluationEvent) -> None:
        """A policy version has been evaluated."""

    def close(self) -> None:
        """The training ends, for any reason. No method is called after this."""


class Starter(Protocol):
    """What an entry point returns when it is called without arguments.

    It may have `needs`, the modules that `start` imports: the trainer refuses to start if one is not installed.
    """

    name: str
    """Its name in run files."""
    description: str
    """One sentence."""
    parameters: type[Parameters]

    def start(self, training: TrainingFacts, parameters: Any) -> Callback:
        """Create the callback; `parameters` is an instance of the class `parameters`."""
        ...


# Axes of our own, because W&B's step must increase: after a restart steps are reported again, and the evaluation of a
# version has the number of the next step.
_STEP, _VERSION = "step", "policy_version"


class WandbParameters(Parameters):
    """Arguments of `wandb.init`; W&B takes keys and servers from its environment variables (WANDB_API_KEY …)."""

    project: str = Field("quartet", min_length=1)
    mode: Literal["offline", "online"] = "offline"
    """offline: written into the run's folder; `wandb sync` sends it later."""
    entity: str | None = None
    group: str | None = None
    """Runs of one group are shown together, such as seeds."""
    run_name: str | None = None
    """Default: run.id."""
    tags: list[str] = []


class WandbStarter:
    """Starts a W&B run, or resumes the one with the same id."""

    name = "wandb"
    description = "Sends metrics of steps and evaluations to Weights & Biases."
    parameters = WandbParameters
    needs = ("wandb",)

    def start(self, training: TrainingFacts, parameters: WandbParameters) -> Callback:
        import wandb

        return _WandbCallback(
            wandb.init(
                project=parameters.project,
                entity=parameters.entity,
                mode=parameters.mode,
                id=training.run_id,
                resume="allow" if parameters.mode == "online" else None,
                name=parameters.run_name or training.run_id,
                group=parameters.group,
                dir=training.folder,
                config={"trainer": dict(training.settings), "max_steps": training.max_steps},
                tags=parameters.tags,
                settings=wandb.Settings(silent=True, console="off"),  # the service's output is its log
            )
        )


class _WandbCallback(Callback):
    def __init__(self, run: Any):
        self._run = run
        run.define_metric("*", step_metric=_STEP, step_sync=False)
        run.define_metric("eval/*", step_metric=_VERSION, step_sync=False)

    def on_update(self, update: UpdateEvent) -> None:
        self._log(update.metrics, _STEP, update.step)

    def on_samples(self, samples: SamplesEvent) -> None:
        import wandb

        rows = [
            [group.prompt_text, one.text, one.score.reward, one.score.parsed_answer, one.score.reason]
            for group in samples.groups
            for one in group.completions
        ]
        table = wandb.Table(["prompt", "completion", "reward", "parsed answer", "reason"], rows)
        self._run.log({"samples": table, _STEP: samples.step})

    def on_evaluation(self, evaluation: EvaluationEvent) -> None:
        self._log(evaluation.metrics, _VERSION, evaluation.policy_version)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # waits until W&B's own process has written everything

    def _log(self, metrics: Mapping[str, float], axis: str, value: int) -> None:
        self._run.log({**metrics, axis: value})


ENTRY_POINT_GROUP = "quartet.callbacks"
_PARTS = ("name", "description", "parameters", "start")


class CallbackSection(PluginSection):
    """A callback with its parameters."""

    name: str = Field("", description="`wandb`, or a callback that an installed package brings.")
    file: FunctionPath | None = Field(
        None, description='Instead of a name: a subclass of `Callback` in a Python file, "diary.py:Diary".'
    )
    parameters: dict[str, Any] = Field({}, description="Its parameters.")


class _InFile:
    """Starts a callback of a file: its class is called with the training's facts and the parameters by name."""

    def __init__(self, section: CallbackSection, where: str):
        """Raises ConfigError if the file cannot be loaded, or its class is no callback or does not take these."""
        self.name = section.spec_name
        self._given = section.parameters
        try:
            self._class = load_callable(self.name)
            inspect.signature(self._class).bind(None, **self._given)
        except FileError as error:
            raise ConfigError(f"{where}.file: {error}") from error
        except TypeError as error:
            raise ConfigError(f"{where}.parameters: '{self.name}' cannot be called: {error}") from error
        if not (isinstance(self._class, type) and issubclass(self._class, Callback)):
            raise ConfigError(f"{where}.file: '{self.name}' must be a subclass of quartet_trainer.callbacks.Callback")

    def start(self, training: TrainingFacts, parameters: Any) -> Callback:
        return self._class(training, **self._given)


def load_callbacks(points: Iterable[EntryPoint] | None = None) -> dict[str, Starter]:
    """Return all callbacks by name, in alphabetical order.

    Args:
        points: the entry points to load; by default those of the installed packages.

    Raises:
        ConfigError: an entry point cannot be loaded or is not a callback, or two have the same name.
    """
    return load_plugins("callback", ENTRY_POINT_GROUP, (WandbStarter(),), _PARTS, Parameters, points)


def check_callbacks(sections: Sequence[CallbackSection]) -> list[tuple[Starter | _InFile, Parameters]]:
    """Return the callbacks of `sections` with their parameters, in the same order.

    Raises:
        ConfigError: there is no such callback, a package that it needs is not installed, or its parameters are invalid.
    """
    if not sections:
        return []
    known = load_callbacks()
    found: list[tuple[Starter | _InFile, Parameters]] = []
    for index, section in enumerate(sections):
        where = f"trainer.callbacks[{index}]"
        if section.file:
            found.append((_InFile(section, where), Parameters()))
            continue
        if section.name not in known:
            raise ConfigError(f"{where}.name: there is no callback '{section.name}'; there are: {', '.join(known)}")
        starter = known[section.name]
        if missing := [package for package in getattr(starter, "needs", ()) if find_spec(package) is None]:
            raise ConfigError(
                f"{where}: callback '{section.name}' needs {', '.join(missing)}, not installed here; install it: "
                f"{install_command(*missing)}"
            )
        found.append((starter, read_parameters(starter.parameters, section.parameters, f"{where}.parameters")))
    return found


class Callbacks:
    """The run's callbacks, in the order of the run file. Methods raise TrainingError if a callback fails."""

    def __init__(
        self, chosen: Sequence[tuple[Starter | _InFile, Parameters]] = (), training: TrainingFacts | None = None
    ):
        """Start them. If one fails to start, close those that have started."""
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
        """Call `on_batch`, and before it `on_episode` if a new data pass begins."""
        if not self._running:
            return
        transcripts = (experience_pb2.GroupTranscript.FromString(group.transcript) for group in groups)
        newest = max((transcript.instance.data_pass for transcript in transcripts), default=self._last_pass)
        if newest > self._last_pass:
            self._last_pass = newest
            self._call("on_episode", newest, step)
        self._call("on_batch", BatchEvent(step, tensors, [group.header for group in groups]))

    def update(self, step: int, metrics: dict[str, float]) -> None:
        self._call("on_update", UpdateEvent(step, metrics))

    def samples(self, step: int, groups: Sequence[experience_pb2.GroupTranscript]) -> None:
        self._call("on_samples", SamplesEvent(step, groups))

    def evaluation(self, policy_version: int, metrics: dict[str, float]) -> None:
        self._call("on_evaluation", EvaluationEvent(policy_version, metrics))

    def close(self) -> None:
        """Close all. Failures are logged."""
        while self._running:
            name, callback = self._running.pop()
            try:
                callback.close()
            except Exception as error:  # a package's code may raise anything
                log.error(f"callback '{name}' failed in close: {type(error).__name__}: {error}")

    def _call(self, method: str, *arguments: Any) -> None:
        for name, callback in self._running:
            _guarded(name, method, getattr(callback, method), *arguments)


def _guarded(name: str, what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:  # a package's code may raise anything
        raise TrainingError(f"callback '{name}' failed in {what}: {type(error).__name__}: {error}") from error
