"""The trainer's section of the run file, `[trainer]`: the learner's keys and the service's. No torch."""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from quartet_common.config import ConfigError, Section
from quartet_common.ports import check_interface
from quartet_common.transports import OWN_TRANSPORTS, load_transports, read_parameters, transport_names
from quartet_trainer.callbacks import CallbackSection
from quartet_trainer.learner_settings import LearnerSettings


class EvaluationSection(Section):
    """[trainer.evaluation]: held-out prompts answered at a fixed policy version."""

    interval: int = Field(0, ge=0, description="Optimizer steps between evaluations; 0: none on the way.")
    before_training: bool = Field(True, description="Evaluate the weights the run starts from.")
    at_end: bool = Field(True, description="Evaluate the final weights.")
    sets: list[str] | None = Field(None, description="Sets to evaluate. Unset: all of [data.evaluation].")
    timeout_seconds: float = Field(
        600.0, gt=0, description="Time for one set, counted while a rollout is there; then training goes on without it."
    )


class DynamicSamplingSection(Section):
    """[trainer.dynamic_sampling]: groups whose rewards are all equal give their place in the batch to others."""

    enabled: bool | None = Field(None, description="Unset: the algorithm's (dapo: true, the others: false).")
    max_refills: int = Field(
        3, ge=0, description="How often a step's batch is topped up; what is there then is trained as it is."
    )


class CheckpointSection(Section):
    """[trainer.checkpoint]: durable states of the training, from which it goes on after a restart."""

    interval: int = Field(
        100, ge=0, description="Optimizer steps between checkpoints; 0: only at the end and when stopped."
    )
    keep_last: int = Field(2, ge=1, description="Checkpoints kept; older ones are removed.")
    best_metric: str = Field(
        "",
        pattern=r"^$|^eval/.+/.+$",
        description="Evaluation metric, e.g. eval/heldout/ans_acc, whose best checkpoint is kept. Empty: none.",
    )
    best_mode: Literal["max", "min"] = Field("max", description="Whether more or less of best_metric is better.")
    folder: Path | None = Field(None, description="Where they go. Default: checkpoints in the run's folder.")


class EarlyStopSection(Section):
    """[trainer.early_stop]: the run is finished when an evaluation's metric has stopped getting better."""

    metric: str = Field(
        "",
        pattern=r"^$|^eval/.+/.+$",
        description="Evaluation metric, e.g. eval/heldout/ans_acc. Empty: the run is not ended early.",
    )
    mode: Literal["max", "min"] = Field("max", description="Whether more or less of the metric is better.")
    patience: int = Field(5, ge=1, description="Evaluations in a row without improvement after which the run ends.")
    min_delta: float = Field(0.0, ge=0, description="Improvement that counts: by more than this.")


class WeightsSection(Section):
    """[trainer.weights]: how new weights travel to the rollouts."""

    transport: str = Field(
        "gloo",
        description="Way of the tensors. gloo: between CPUs, by TCP; nccl: between GPUs; file: safetensors in a folder "
        "that all see; or the name of another package's.",
    )
    transport_parameters: dict[str, Any] = Field({}, description="Parameters of a transport of another package.")
    folder: Path | None = Field(
        None,
        description="With the file transport: where versions are written, the same path at every rollout. Default: "
        "weights in the run's folder.",
    )
    bucket_bytes: int = Field(32 << 20, ge=1 << 10, description="Size of the packed buckets.")
    timeout_seconds: float = Field(
        60.0,
        gt=0,
        description="Time in which an update must reach the rollouts, retries included, beside that of its bytes.",
    )
    least_bandwidth: float = Field(
        50e6,
        gt=0,
        description="Bytes per second at which the trainer sends at least, to all rollouts together: an update has "
        "timeout_seconds + bytes * rollouts / least_bandwidth.",
    )
    store_host: str = Field(
        "",
        description="Host at which rollouts reach the group's store and Gloo. Default: the interface's "
        "address, if one is named; else the trainer's.",
    )
    store_port: int = Field(0, ge=0, le=65535, description="Port of the store; 0: any free one.")
    interface: str = Field(
        "",
        description="Network interface of the weight group here, e.g. eth1: its store, Gloo and NCCL listen there "
        "alone. Default: that of store_host.",
    )
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        "keep", description="Completions under way: kept and continued, finished first, or started again."
    )
    overlap: bool = Field(
        True, description="Send from a copy while the next step is trained; false: training waits for the update."
    )
    sleep_rollouts: bool = Field(
        False,
        description="Rollouts sleep while a step is trained, and the new weights wake them: for a GPU that both share "
        "(launcher.colocate).",
    )
    keep_kv_cache: bool = Field(
        False, description="Keep the old weights' KV cache: faster, and wrong by the change of weights."
    )

    @field_validator("transport")
    @classmethod
    def _transport_is_there(cls, transport: str) -> str:
        if transport not in transport_names():
            raise ValueError(f"there is no such transport here; allowed: {str(transport_names())[1:-1]}")
        return transport

    @model_validator(mode="after")
    def _completions_need_not_end_asleep(self) -> Self:
        if self.sleep_rollouts and self.pause_mode == "wait":
            raise ValueError("pause_mode: got 'wait' with sleep_rollouts, and none ends asleep; allowed: keep, abort")
        return self

    @model_validator(mode="after")
    def _transport_parameters_are_of_another(self) -> Self:
        if self.transport_parameters and self.transport in OWN_TRANSPORTS:
            raise ValueError(f"transport_parameters: {self.transport} takes none; its keys are in [trainer.weights]")
        return self


class TrainerSection(LearnerSettings):
    """[trainer]: the learner's keys, flat, and the service's."""

    ranks: int = Field(1, ge=1, description="Processes of the training job on this host; more than one by torchrun.")
    torch_threads: int = Field(1, ge=1, description="Threads of torch's operators, per rank.")
    evaluation: EvaluationSection = Field(EvaluationSection(), description="Evaluations.")
    dynamic_sampling: DynamicSamplingSection = Field(
        DynamicSamplingSection(), description="Groups that teach nothing are replaced."
    )
    max_invalid_groups: int = Field(
        1000, ge=0, description="Groups in a row that cannot be trained after which the run has failed; 0: any number."
    )
    early_stop: EarlyStopSection = Field(EarlyStopSection(), description="When a run ends before its last step.")
    prefetch: bool = Field(True, description="Fetch the next batch while this one is trained.")
    checkpoint: CheckpointSection = Field(CheckpointSection(), description="Checkpoints.")
    weights: WeightsSection = Field(WeightsSection(), description="Weight updates.")
    samples_interval: int = Field(10, ge=0, description="Steps between readable samples of the batch; 0: none.")
    samples_groups: int = Field(2, ge=1, description="Prompt groups in one sample.")
    rollout_log_interval: int = Field(20, ge=0, description="Steps between lines of rollouts.jsonl; 0: none.")
    tensorboard: bool = Field(True, description="Write TensorBoard event files.")
    callbacks: list[CallbackSection] = Field([], description="Code of other packages that is called during training.")
    broker_timeout_seconds: float = Field(
        600.0, gt=0, description="How long a broker that went away during the run is waited for."
    )

    @model_validator(mode="after")
    def _metrics_are_evaluated(self) -> Self:
        for key, name in (
            ("checkpoint.best_metric", self.checkpoint.best_metric),
            ("early_stop.metric", self.early_stop.metric),
        ):
            if not name:
                continue
            if not (self.evaluation.interval or self.evaluation.before_training):
                raise ValueError(f"{key} is {name!r}, but nothing is evaluated on the way: set evaluation.interval")
            if self.evaluation.sets is not None and name.split("/")[1] not in self.evaluation.sets:
                raise ValueError(
                    f"{key} is {name!r}, but evaluation.sets has {self.evaluation.sets}: name one of them after 'eval/'"
                )
        return self

    @property
    def samples_dynamically(self) -> bool:
        """Whether groups without variance are replaced, by the setting or by the algorithm."""
        chosen = self.dynamic_sampling.enabled
        return self.algorithm == "dapo" if chosen is None else chosen


def check_transport(settings: WeightsSection) -> None:
    """Raise ConfigError when the weights' transport cannot work on this machine. Imports torch for nccl alone."""
    if settings.transport == "nccl":
        from quartet_weights.process_group import nccl_missing

        if reason := nccl_missing():
            raise ConfigError(f"trainer.weights.transport: nccl is not possible here: {reason}")
    check_interface("trainer.weights.interface", settings.interface)
    if settings.transport not in OWN_TRANSPORTS:
        read_parameters(load_transports()[settings.transport], settings.transport_parameters)
