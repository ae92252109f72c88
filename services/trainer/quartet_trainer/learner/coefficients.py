"""The coefficients of the KL and of the entropy, constant or adapted after each step towards a target."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quartet_trainer.learner_settings import LearnerSettings


class Coefficients:
    """What the next step is trained with; the same on every rank, for it depends on metrics of the whole batch alone.

    kl: Ziegler et al. 2019, arXiv:1909.08593: times 1 + clip(KL / target - 1, -0.2, 0.2) * completions / horizon.
    entropy: Skywork-OR1 (He et al. 2025, arXiv:2505.22312): a delta more after a step whose entropy was at or below the
    target, otherwise a delta less; it is applied only after the former.
    """

    kl: float
    entropy: float
    """As applied: 0 unless the last step's entropy was at or below the target, if there is one."""

    def __init__(self, settings: LearnerSettings) -> None:
        self._settings = settings
        self.kl = settings.kl_coefficient
        self._entropy = settings.entropy_coefficient
        self.entropy = self._entropy if settings.entropy_target is None else 0.0

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step into account, by the learner's names; of one without a trained token nothing."""
        settings = self._settings
        if not metrics["trained_tokens"]:
            return
        if settings.kl_target is not None and math.isfinite(metrics["kl"]):
            error = min(max(metrics["kl"] / settings.kl_target - 1, -0.2), 0.2)
            self.kl *= 1 + error * min(1.0, metrics["completions"] / settings.kl_horizon)
        if settings.entropy_target is not None and math.isfinite(metrics["entropy"]):
            low = metrics["entropy"] <= settings.entropy_target
            delta = settings.entropy_coefficient_delta if low else -settings.entropy_coefficient_delta
            self._entropy = min(max(self._entropy + delta, 0.0), settings.entropy_coefficient_max)
            self.entropy = self._entropy if low else 0.0

    def metrics(self) -> dict[str, float]:
        """The coefficients that adapt, by the names of their metrics."""
        adaptive = {"kl_coefficient": self._settings.kl_target, "entropy_coefficient": self._settings.entropy_target}
        values = {"kl_coefficient": self.kl, "entropy_coefficient": self.entropy}
        return {name: values[name] for name, target in adaptive.items() if target is not None}

    def state(self) -> dict[str, float]:
        """For a checkpoint's manifest."""
        return {"kl": self.kl, "entropy": self._entropy, "entropy_applied": self.entropy}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint's `state`; what does not adapt is as the settings have it."""
        if self._settings.kl_target is not None:
            self.kl = state["kl"]
        if self._settings.entropy_target is not None:
            self._entropy, self.entropy = state["entropy"], state["entropy_applied"]
