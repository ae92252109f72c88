"""The run file's section `[trainer]`: the learner's keys and the service's. Imports no torch."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from quartet_common.config import ConfigError
from quartet_common.ports import interface_address
from quartet_common.run_file import Problems
from quartet_common.sections import Section, all_by_name
from quartet_server.plugins import read_parameters
from quartet_server.transports import OWN_TRANSPORTS, load_transports, transport_names
from quartet_trainer.callbacks import CallbackSection
from quartet_trainer.learner_settings import LearnerSettings


class EvaluationSection(Section):
    """[trainer.evaluation]: evaluations on held-out prompts, each at one policy version."""

    interval: int = Field(0, ge=0, description="Optimizer steps between evaluations; 0: none during training.")
    before_training: bool = Field(True, description="Evaluate the weights the run starts from.")
    at_end: bool = Field(True, description="Evaluate the final weights.")
    sets: list[str] | None = Field(None, description="Sets to evaluate. Unset: all of [data.evaluation].")
    timeout_seconds: float = Field(
        600.0, gt=0, description="Time limit for one set, counted while a rollout has the weights; then it is skipped."
    )


class DynamicSamplingSection(Section):
    """[trainer.dynamic_sampling]: groups that teach nothing, as their rewards are all equal, are replaced by others."""

    enabled: bool | None = Field(None, description="Unset: as the algorithm has it.")
    max_refills: int = Field(
        3, ge=0, description="How many times a step's batch is refilled; after that it is trained as it is."
    )
    accuracy_range: tuple[float, float] | None = Field(
        None,
        description="Groups whose mean answer accuracy is below the first or above the second are replaced too; "
        "[0.01, 0.99] in ColossalChat. Unset: none.",
    )

    @field_validator("accuracy_range")
    @classmethod
    def _range_is_of_accuracies(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is not None and not 0 <= bounds[0] < bounds[1] <= 1:
            raise ValueError(f"must be two numbers from 0 to 1, the smaller first; got {list(bounds)}")
        return bounds


class CheckpointSection(Section):
    """[trainer.checkpoint]: checkpoints, from which a restarted trainer resumes."""

    interval: int = Field(
        100, ge=0, description="Optimizer steps between checkpoints; 0: only at the end and when stopped."
    )
    keep_last: int = Field(2, ge=1, description="Checkpoints kept; older ones are removed.")
    best_metric: str = Field(
        "",
        pattern=r"^$|^eval/.+/.+$",
        description="Evaluation metric, e.g. eval/heldout/ans_acc, whose best checkpoint is kept. Empty: none.",
    )
    best_mode: Literal["max", "min"] = Field("max", description="Whether a higher or a lower best_metric is better.")
    folder: Path | None = Field(
        None, description="Folder of the checkpoints. Default: checkpoints in the run's folder."
    )


class EarlyStopSection(Section):
    """[trainer.early_stop]: the run is finished when an evaluation metric stops improving."""

    metric: str = Field(
        "",
        pattern=r"^$|^eval/.+/.+$",
        description="Evaluation metric, e.g. eval/heldout/ans_acc. Empty: no early stopping.",
    )
    mode: Literal["max", "min"] = Field("max", description="Whether a higher or a lower metric is better.")
    patience: int = Field(5, ge=1, description="Evaluations in a row without improvement after which the run ends.")
    min_delta: float = Field(0.0, ge=0, description="Improvements of at most this do not count.")


class WeightsSection(Section):
    """[trainer.weights]: how new weights are sent to the rollouts."""

    transport: str = Field(
        "gloo",
        description="gloo: between CPUs, over TCP; nccl: between GPUs; file: safetensors in a shared folder; or one "
        "that an installed package brings.",
    )
    transport_parameters: dict[str, Any] = Field(
        {}, description="Parameters of a transport that an installed package brings."
    )
    folder: Path | None = Field(
        None,
        description="Folder of the file transport, at the same path for all. Default: weights in the run's folder.",
    )
    bucket_bytes: int = Field(32 << 20, ge=1 << 10, description="Size of the packed buckets.")
    timeout_seconds: float = Field(
        60.0,
        gt=0,
        description="Time limit of an update, retries included, in addition to the time for its bytes.",
    )
    least_bandwidth: float = Field(
        50e6,
        gt=0,
        description="Least bytes per second to expect, to all rollouts together: an update may take timeout_seconds + "
        "bytes * rollouts / least_bandwidth.",
    )
    store_host: str = Field(
        "",
        description="Host at which rollouts reach the group's store and Gloo. Default: the address of interface, if "
        "set, else the trainer's.",
    )
    store_port: int = Field(0, ge=0, le=65535, description="Port of the store; 0: any free one.")
    interface: str = Field(
        "",
        description="Network interface of the weight group at the trainer, e.g. eth1: store, Gloo and NCCL listen only "
        "there. Default: that of store_host.",
    )
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        "keep", description="Running completions are kept and continued, finished first, or started again."
    )
    overlap: bool = Field(
        True, description="Send from a copy while the next step is trained; false: training waits for the update."
    )
    sleep_rollouts: bool = Field(
        False,
        description="Put rollouts to sleep while a step is trained, until the new weights come: for a shared GPU "
        "(launcher.colocate).",
    )
    keep_kv_cache: bool = Field(False, description="Keep the KV cache of the old weights: faster, but inexact.")

    @field_validator("transport")
    @classmethod
    def _transport_is_there(cls, transport: str) -> str:
        if transport not in transport_names():
            raise ValueError(f"there is no such transport here; allowed: {str(transport_names())[1:-1]}")
        return transport

    @model_validator(mode="after")
    def _completions_need_not_end_asleep(self) -> Self:
        if self.sleep_rollouts and self.pause_mode == "wait":
            raise ValueError("pause_mode: got 'wait', but asleep no completion can finish; allowed: keep, abort")
        return self

    @model_validator(mode="after")
    def _transport_parameters_are_of_another(self) -> Self:
        if self.transport_parameters and self.transport in OWN_TRANSPORTS:
            raise ValueError(f"transport_parameters: {self.transport} takes none; its keys are in [trainer.weights]")
        return self


class TrainerSection(LearnerSettings):
    """[trainer]: the policy's training, and the trainer service."""

    ranks: int = Field(1, ge=1, description="Processes of the training job on this host; several hosts: docs/hosts.md.")
    interface: str = Field(
        "",
        description="Network interface of the ranks' own process groups, Gloo's and NCCL's, e.g. eth1. Default: that "
        "of the route to MASTER_ADDR.",
    )
    rendezvous_seconds: float = Field(
        300.0, gt=0, description="How long ranks wait at the start until all have come and reach one another."
    )
    torch_threads: int = Field(1, ge=1, description="Threads of torch's operators, per rank.")
    evaluation: EvaluationSection = Field(EvaluationSection(), description="Evaluations.")
    dynamic_sampling: DynamicSamplingSection = Field(
        DynamicSamplingSection(), description="Replaces groups whose rewards are all equal."
    )
    max_invalid_groups: int = Field(
        1000, ge=0, description="Invalid groups in a row after which the run has failed; 0: no limit."
    )
    early_stop: EarlyStopSection = Field(EarlyStopSection(), description="Early stopping.")
    prefetch: bool = Field(True, description="Fetch the next batch while this one is trained.")
    checkpoint: CheckpointSection = Field(CheckpointSection(), description="Checkpoints.")
    weights: WeightsSection = Field(WeightsSection(), description="Weight updates.")
    samples_interval: int = Field(10, ge=0, description="Steps between samples of the batch in samples/; 0: none.")
    samples_groups: int = Field(2, ge=1, description="Prompt groups in one sample.")
    samples_keep_last: int = Field(200, ge=0, description="Newest samples kept, beside rollouts.jsonl; 0: all.")
    rollout_log_interval: int = Field(20, ge=0, description="Steps between lines of rollouts.jsonl; 0: none.")
    rollout_log_completions: Literal["first", "all"] = Field(
        "first", description="Completions of each group in rollouts.jsonl."
    )
    peak_tflops: float = Field(
        0.0,
        ge=0,
        description="TFLOP/s of one device in the training's precision, by its maker, such as 989 (H100, bf16): "
        "throughput/mfu is reported. 0: it is not.",
    )
    tensorboard: bool = Field(True, description="Write TensorBoard event files.")
    callbacks: Annotated[
        list[CallbackSection], BeforeValidator(all_by_name, json_schema_input_type=list[str | CallbackSection])
    ] = Field([], description="Code of a file or another package that is called during training.")
    stall_seconds: float | None = Field(
        None,
        gt=0,
        description="A rank that works and does no part of it, as a micro-batch, for so long has hung: all ranks end "
        "with status 1. Checkpoints and weight updates have time for their bytes besides. Default: ten times the "
        "slowest part so far, at least 120, and 1800 more until the first step is trained.",
    )
    broker_timeout_seconds: float = Field(
        600.0, gt=0, description="How long calls are retried while the broker is unavailable during the run."
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
                raise ValueError(
                    f"{key} is {name!r}, but nothing is evaluated during training: set evaluation.interval"
                )
            if self.evaluation.sets is not None and name.split("/")[1] not in self.evaluation.sets:
                raise ValueError(
                    f"{key} is {name!r}, but evaluation.sets has {self.evaluation.sets}: name one of them after 'eval/'"
                )
        return self

    @model_validator(mode="after")
    def _accuracy_is_sampled_by(self) -> Self:
        if self.dynamic_sampling.accuracy_range and not self.samples_dynamically:
            raise ValueError(
                "dynamic_sampling.accuracy_range: no group is replaced; set dynamic_sampling.enabled = true, or leave "
                "it out"
            )
        return self

    @model_validator(mode="after")
    def _every_group_teaches(self) -> Self:
        if self.samples_dynamically and self.distillation.coefficient and not self.distillation.reward_weight:
            raise ValueError(
                "dynamic_sampling: a distillation without rewards learns from every group, also from those of equal "
                "rewards; set dynamic_sampling.enabled = false, or distillation.reward_weight above 0"
            )
        return self

    @property
    def samples_dynamically(self) -> bool:
        """Whether groups without variance are replaced, by the setting or by the algorithm."""
        chosen = self.dynamic_sampling.enabled
        return self.algorithm.samples_dynamically if chosen is None else chosen


def check_transport(settings: WeightsSection) -> None:
    """Raise ConfigError if the transport cannot work on this machine. Imports torch only for nccl."""
    if settings.transport == "nccl":
        from quartet_weights.process_group import nccl_missing

        if reason := nccl_missing():
            raise ConfigError(f"trainer.weights.transport: nccl is not possible here: {reason}")
    if settings.transport not in OWN_TRANSPORTS:
        model = load_transports()[settings.transport].parameters
        read_parameters(model, settings.transport_parameters, "trainer.weights.transport_parameters")


def check_interfaces(settings: TrainerSection) -> None:
    """Raise ConfigError if an interface is not of this host, has no address, or cannot be NCCL's."""
    own, other = settings.interface, settings.weights.interface
    with Problems() as problems:
        for key, name in (("trainer.interface", own), ("trainer.weights.interface", other)):
            with problems.collecting():
                if name:
                    interface_address(key, name)
    if settings.weights.transport == "nccl" and own and other and own != other:
        raise ConfigError(f"trainer.weights.interface: got '{other}'; a process has one for NCCL: allowed: '{own}'")
