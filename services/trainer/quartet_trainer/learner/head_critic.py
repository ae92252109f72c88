"""PPO's critic where it is a head on the policy: its term of the policy's loss, its learning rate, its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from quartet_trainer.algorithms.losses import clipped_value_loss
from quartet_trainer.batches import ExperienceBatch, MicroBatch
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.metrics import target_metrics
from quartet_trainer.learner.optimizer import LearningRate
from quartet_trainer.learner.planner import CriticTargets
from quartet_trainer.learner.plugins import Plugin
from quartet_trainer.learner_settings import LearnerSettings


class HeadCritic:
    """The value head of one learner.

    Forward, backward, optimizer and gradient norm are the policy's. A checkpoint has the head in a file of its own;
    rollouts and exported folders, which hold the language model alone, never see it.
    """

    file = "value_head.safetensors"

    def __init__(self, settings: LearnerSettings, plugin: Plugin, max_steps: int) -> None:
        """Take the plugin, whose model is spread with `plugin.value_head` in it; `max_steps` are the run's.

        Raises:
            RuntimeError: it has none.
        """
        if plugin.value_head is None:
            raise RuntimeError("the plugin was given no value head before it was boosted")
        self._plugin = plugin
        self._head = plugin.value_head
        self._coefficient = settings.critic.value_coefficient
        self._clip = settings.critic.value_clip
        rate = settings.learning_rate if settings.critic.learning_rate is None else settings.critic.learning_rate
        self.learning_rate = LearningRate(settings.model_copy(update={"learning_rate": rate}), max_steps)
        """Of the head's own weights; the trunk's is the policy's."""

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """The values [t] of a micro-batch's tokens, without gradient. Local."""
        return self._plugin.values(micro_batch)

    def loss(self, micro_batch: MicroBatch, values: Tensor, targets: CriticTargets) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of value_coefficient * mean loss over the batch's trained tokens. Local.

        Args:
            micro_batch: on the training device.
            values: float [t], with gradient.
            targets: of the whole batch.

        Returns:
            The part, and sums by their names in `metrics.SUMS`: of the loss without its coefficient, of clipped tokens.
        """
        chosen = micro_batch.tokens.cpu()
        old, returns = targets.old_values[chosen].to(values), targets.returns[chosen].to(values)
        losses, clipped = clipped_value_loss(values, old, returns, self._clip)
        part = losses.sum() * (0.0 if targets.plan.idle else 1 / max(1, int(targets.plan.mask.sum())))
        return self._coefficient * part, {"value_loss": part.detach(), "value_clip_ratio": clipped.sum()}

    def learn(self, batch: ExperienceBatch, targets: CriticTargets, step: int) -> dict[str, float]:
        """Nothing is left to do after the policy's passes; metrics of the targets."""
        return target_metrics(targets.plan.mask, targets.old_values, targets.returns)

    def copies(self) -> dict[str, Tensor]:
        """All that a checkpoint keeps, whole, copied to the CPU: "model/NAME" and AdamW's "MOMENT/NAME". Collective."""
        tensors = {}
        states = self._plugin.optimizer.unwrap().state
        for name, parameter in self._head.named_parameters():
            held = self._plugin.trained(parameter)
            for kind, value in {"model": held, **states.get(held, {})}.items():
                whole = value if value.ndim == 0 else self._plugin.whole(parameter, value)
                tensors[f"{kind}/{name}"] = whole.detach().to("cpu", copy=True).contiguous()
        return tensors

    @torch.no_grad()
    def load(self, file: Path) -> None:
        """Go back to what `copies` gave, under whatever plugin, read from `file`. Local.

        Raises:
            LearnerError: there is none, or it is of another model.
        """
        if not file.is_file():
            raise LearnerError(f"{file.parent} has no value head; it was not written with critic.form = 'head'")
        tensors, plugin = load_file(file), self._plugin
        for name, parameter in self._head.named_parameters():
            weights = tensors.get(f"model/{name}")
            if weights is None or weights.shape != parameter.shape:
                raise LearnerError(f"{file} is of another critic: {name} is missing or of another shape")
            held = plugin.trained(parameter)
            parameter.copy_(weights)
            held.copy_(plugin.piece(name, weights))
            names = {key: f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step")}
            if names["step"] in tensors:
                moments = {key: tensors[stored] for key, stored in names.items()}
                plugin.optimizer.unwrap().state[held] = {
                    key: value.to(held.device)
                    if value.ndim == 0
                    else plugin.piece(name, value).to(held.device, held.dtype).contiguous()
                    for key, value in moments.items()
                }
