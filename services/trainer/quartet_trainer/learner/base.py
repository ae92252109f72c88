"""What the training loop knows of a learner.

This module imports no torch at run time: the loop, the configuration and the tests of both may import it freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from quartet.v1 import experience_pb2, rollout_pb2


class RunLike(Protocol):
    """What the learner reads of the run (`quartet_common.config.RunSection` has it)."""

    @property
    def max_steps(self) -> int:
        """Optimizer steps of the whole run: the length of the learning-rate schedule. 0: unknown."""

    @property
    def sampling(self) -> Any:
        """Its `max_new_tokens` is the constant length of the "constant" aggregation (Dr. GRPO)."""

    @property
    def sampling_masks(self) -> bool:
        """Whether log-probs are of the candidates that each token was drawn from."""

    @property
    def router_replay(self) -> bool:
        """Whether a mixture of experts sends each token to the experts that it went to in the rollout."""


class Learner(Protocol):
    """The model being trained, its optimizer and its algorithm, spread over the ranks of one job.

    Every method is collective: all ranks call it, in the same order, with the same arguments.
    """

    step: int
    """Optimizer steps done, which is the policy version of the weights."""

    def check_group(self, group: experience_pb2.GroupTensors) -> None:
        """Local, and for any thread. Raises ExperienceError for a group that `train_step` would refuse."""

    def train_step(self, groups: Sequence[experience_pb2.GroupTensors]) -> dict[str, float]:
        """Train on one global batch, with exactly one optimizer step.

        Args:
            groups: the whole batch, the same in the same order on every rank; each rank takes its share of it. With
                several mini-batches their order decides which groups are updated on together.

        Returns:
            Metrics of the global batch, the same on every rank; `quartet_trainer.learner.metrics` names them.

        Raises:
            quartet_trainer.batch.ExperienceError: a group is not what the contract says; nothing was trained.
        """

    def weight_specs(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Name (Hugging Face's), `quartet.v1.tensor_pb2.Dtype` and shape of each tensor of `weights()`, in order."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as they stand: detached, contiguous, on the training device. A tied `lm_head` is left out.

        A tensor may share memory with the parameter: it is valid until the next `train_step` or `load`.
        """

    @property
    def lora(self) -> rollout_pb2.LoraConfig | None:
        """The adapter whose tensors `weights` yields, by PEFT's names; None: they are the whole model's. Local."""

    def save(self, folder: Path, state: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
        """Write a checkpoint: durable and complete at `folder` when this returns, and not there at all before.

        Args:
            folder: does not need to exist, e.g. `checkpoints.checkpoint_folder(root, step)`. An older one is replaced.
            state: the caller's own; what JSON can hold.
            facts: what others than a learner read of the checkpoint; into its manifest, and what JSON can hold.

        Raises:
            LearnerError: the folder could not be written; on every rank.
        """

    def snapshot(self, folder: Path, state: dict[str, Any], facts: dict[str, Any] | None = None) -> Callable[[], None]:
        """Copy into memory what this rank would write in `save`, and return what writes it as `save` does.

        Every rank calls the function returned, once, in any thread, while training goes on, and before the next
        snapshot. It raises LearnerError.
        """

    def load(self, folder: Path) -> dict[str, Any]:
        """Go back to a checkpoint: weights, optimizer and `step`. Returns the caller's `state`.

        Raises:
            LearnerError: the checkpoint is incomplete or of another model.
        """

    def export(self, folder: Path) -> None:
        """Write the model alone as a Hugging Face folder, tokenizer files included, atomically as `save` does."""
