"""The coefficients of the KL and of the entropy, where they adapt: by hand, as TRL's, and through the learner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from learner_helpers import assert_near, comparable, make_batch, make_learner, settings

from quartet_trainer.learner.coefficients import Coefficients

SEEN = {"trained_tokens": 10.0, "completions": 16.0}


def test_kl_coefficient_is_that_of_ziegler() -> None:
    """KLs far above, far below, near and at the target; a step takes at most a fifth, whatever the horizon."""
    coefficients = Coefficients(settings(kl_coefficient=0.3, kl_target=0.05, kl_horizon=64))
    expected = 0.3
    for kl, error in ((4.0, 0.2), (-1.0, -0.2), (0.052, 0.04), (0.05, 0.0), (0.045, -0.1)):
        coefficients.adapt({**SEEN, "kl": kl})
        expected *= 1 + error * 16 / 64
        assert coefficients.kl == pytest.approx(expected, rel=1e-12)
    for kl in (math.nan, math.inf):  # of a step that changes no weight
        coefficients.adapt({**SEEN, "kl": kl})
        coefficients.adapt({**SEEN, "kl": 4.0, "trained_tokens": 0.0})
        assert coefficients.kl == pytest.approx(expected, rel=1e-12)
    coefficients.adapt({**SEEN, "kl": 0.0, "completions": 1000.0})
    assert coefficients.kl == pytest.approx(0.8 * expected, rel=1e-12)


OF_TRL = [  # a step's entropy, what it was trained with, and the coefficient after it
    *((0.9, 0.0, 0.0), (0.4, 0.0, 0.02), (0.3, 0.02, 0.04), (0.3, 0.04, 0.05), (0.6, 0.05, 0.03)),
    *((0.6, 0.0, 0.01), (0.6, 0.0, 0.0), (0.6, 0.0, 0.0), (0.5, 0.0, 0.02)),
]
"""From TRL 1.16's `GRPOTrainer` with use_adaptive_entropy, entropy_coef 0.02, entropy_target 0.5, entropy_coef_delta
0.02 and entropy_coef_max 0.05: the loss gives what was applied."""


def test_entropy_coefficient_is_that_of_trl() -> None:
    keys = {"entropy_target": 0.5, "entropy_coefficient_delta": 0.02, "entropy_coefficient_max": 0.05}
    coefficients = Coefficients(settings(entropy_coefficient=0.02, **keys))
    for entropy, applied, following in OF_TRL:
        assert coefficients.entropy == pytest.approx(applied, rel=1e-9)
        assert coefficients.metrics() == {"entropy_coefficient": coefficients.entropy}
        coefficients.adapt({**SEEN, "entropy": entropy})
        assert coefficients.state()["entropy"] == pytest.approx(following, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("kl_in", "kls"), [("loss", (0.3, 0.24, 0.288)), ("reward", (0.3, 0.36, 0.432))])
def test_steps_are_those_of_constants_of_the_same_value(model_path: Path, kl_in: str, kls: tuple[float, ...]) -> None:
    """The KL in the loss is 0 before the first step; that of the rollout's policy never."""
    values: dict[str, Any] = {"kl_in": kl_in, "kl_coefficient": 0.3, "learning_rate": 1e-2}
    adaptive = {"kl_target": 1e-4, "kl_horizon": 16, "entropy_target": 100.0, "entropy_coefficient_delta": 0.5}
    learner = make_learner(model_path, **values, **adaptive)
    constant = make_learner(model_path, **values, entropy_coefficient=1.0)
    for step, kl in enumerate(kls):
        groups = make_batch(seed=step)
        found = learner.train_step(groups)
        assert found.pop("kl_coefficient") == pytest.approx(kl, rel=1e-12)
        assert found.pop("entropy_coefficient") == 0.5 * step
        constant._coefficients.kl, constant._coefficients.entropy = kl, 0.5 * step
        assert comparable(found) == pytest.approx(comparable(constant.train_step(groups)), rel=1e-9, abs=1e-12)
    assert_near(dict(learner.weights()), dict(constant.weights()), rtol=1e-9, atol=1e-12)
