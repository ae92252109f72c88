"""The callback `wandb`: every metric to Weights & Biases, online or into the run's folder."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from quartet_trainer.callbacks.base import Callback, EvaluationEvent, Parameters, TrainingFacts, UpdateEvent

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
