"""The trainer's section of the run file, `[trainer]`: the learner's keys and the service's. No torch."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from quartet_common.config import Section
from quartet_trainer.learner.settings import LearnerSettings


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
    folder: Path | None = Field(None, description="Where they go. Default: checkpoints in the run's folder.")


class WeightsSection(Section):
    """[trainer.weights]: how new weights travel to the rollouts."""

    transport: Literal["gloo"] = Field("gloo", description="Way of the tensors: torch.distributed Gloo, between CPUs.")
    bucket_bytes: int = Field(64 << 20, ge=1 << 10, description="Size of the packed buckets.")
    timeout_seconds: float = Field(
        60.0, gt=0, description="Time in which an update must reach the rollouts, retries included."
    )
    store_host: str = Field(
        "", description="Host at which rollouts reach the group's TCPStore and Gloo. Default: the trainer's address."
    )
    store_port: int = Field(0, ge=0, le=65535, description="Port of the TCPStore; 0: any free one.")
    pause_mode: Literal["keep", "wait", "abort"] = Field(
        "keep", description="Completions under way: kept and continued, finished first, or started again."
    )
    keep_kv_cache: bool = Field(
        False, description="Keep the old weights' KV cache: faster, and wrong by the change of weights."
    )


class TrainerSection(LearnerSettings):
    """[trainer]: the learner's keys, flat, and the service's."""

    ranks: int = Field(1, ge=1, description="Processes of the training job on this host; more than one by torchrun.")
    torch_threads: int = Field(1, ge=1, description="Threads of torch's operators, per rank.")
    evaluation: EvaluationSection = Field(EvaluationSection(), description="Evaluations.")
    dynamic_sampling: DynamicSamplingSection = Field(
        DynamicSamplingSection(), description="Groups that teach nothing are replaced."
    )
    checkpoint: CheckpointSection = Field(CheckpointSection(), description="Checkpoints.")
    weights: WeightsSection = Field(WeightsSection(), description="Weight updates.")
    samples_interval: int = Field(10, ge=0, description="Steps between readable samples of the batch; 0: none.")
    samples_groups: int = Field(2, ge=1, description="Prompt groups in one sample.")
    tensorboard: bool = Field(True, description="Write TensorBoard event files.")
    broker_timeout_seconds: float = Field(
        600.0, gt=0, description="How long a broker that went away during the run is waited for."
    )

    @property
    def samples_dynamically(self) -> bool:
        """Whether groups without variance are replaced, by the setting or by the algorithm."""
        chosen = self.dynamic_sampling.enabled
        return self.algorithm == "dapo" if chosen is None else chosen
