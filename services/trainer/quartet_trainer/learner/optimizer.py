"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from quartet_common.python_file import in_a_file
from quartet_trainer.learner_settings import LearnerSettings, check_schedule, schedule_in_file


def create_optimizer(
    model: nn.Module, settings: LearnerSettings, value_head: nn.Module | None = None
) -> torch.optim.AdamW:
    """Fused AdamW over the trainable parameters; weight decay on matrices only.

    Parameters of `value_head`, a part of `model`, are in groups of their own, marked "value_head": they have another
    learning rate.
    """
    own = [] if value_head is None else list(value_head.parameters())
    apart = {id(parameter) for parameter in own}
    trainable = [p for p in model.parameters() if p.requires_grad and id(p) not in apart]
    groups = []
    for parameters, mark in ((trainable, {}), (own, {"value_head": True})):
        matrices, others = [p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]
        groups += [
            {"params": matrices, "weight_decay": settings.weight_decay, **mark},
            {"params": others, "weight_decay": 0.0, **mark},
        ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.adam_betas,
        eps=settings.adam_epsilon,
        fused=True,
    )


class LearningRate:
    """The learning rate as a function of the step alone, so that a checkpoint has no state of it."""

    def __init__(self, settings: LearnerSettings, max_steps: int) -> None:
        """Take the schedule from the settings.

        Args:
            settings: `schedule`, `warmup_steps`, `schedule_steps`, `min_learning_rate_ratio`.
            max_steps: steps of the run, the schedule's length where the settings give none; 0: unknown.

        Raises:
            LearnerError: a decaying schedule has no length, or is no longer than its warm-up.
        """
        check_schedule(settings, max_steps)
        self._peak = settings.learning_rate
        self._warmup = settings.warmup_steps
        self._schedule = settings.schedule
        self._floor = settings.min_learning_rate_ratio
        self._end = settings.schedule_steps or max_steps
        self._factor = schedule_in_file(self._schedule, self._end) if in_a_file(self._schedule) else None

    def __call__(self, step: int) -> float:
        """The rate of the step after `step` steps (>= 0)."""
        if step < self._warmup:
            return self._peak * (step + 1) / self._warmup
        if self._factor is not None:
            return self._peak * self._factor(step)
        if self._schedule == "constant":
            return self._peak
        progress = min(1.0, (step - self._warmup) / (self._end - self._warmup))
        left = (1 + math.cos(math.pi * progress)) / 2 if self._schedule == "cosine" else 1 - progress
        return self._peak * (self._floor + (1 - self._floor) * left)
