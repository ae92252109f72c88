"""PPO with a value head on the policy: it starts at 0, and rollouts and exports never see it.

Loss, gradient and skipped updates: `test_algorithms`. Several updates: `test_mini_batches`. Ranks and ZeRO:
`test_plugins`. Checkpoints: `test_checkpoints`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import Run, make_batch, settings
from safetensors.torch import load_file

from quartet_trainer.learner import create_learner
from quartet_trainer.learner.metrics import METRICS


def test_the_head_starts_at_zero_and_learns_at_its_own_rate(model_path: Path) -> None:
    """The same batch again and again, the trunk held still: the head alone comes to explain the returns."""
    critic = {"form": "head", "learning_rate": 5e-2, "value_clip": 0.0, "value_coefficient": 1.0}
    values = {"algorithm": "ppo", "max_mean_ratio": 0, "critic": critic, "learning_rate": 0.0, "gae_lambda": 1.0}
    learner = create_learner(settings(**values), model_path, Run())
    assert not any(parameter.any() for parameter in learner._plugin.value_head.parameters())
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    groups = make_batch(seed=33, groups=2, size=2, longest=6)  # fewer tokens than the head has weights
    metrics = [learner.train_step(groups) for _ in range(25)]
    assert metrics[0]["value_mean"] == 0.0
    assert metrics[-1]["value_loss"] < 0.5 * metrics[0]["value_loss"]
    assert metrics[-1]["value_explained_variance"] > 0.5
    assert {METRICS[name].only_with for name in metrics[0]} == {"", "critic"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())


@pytest.mark.parametrize("values", [{}, {"lora": {"r": 4, "target_modules": ["q_proj"]}}], ids=["whole", "adapter"])
def test_it_is_neither_sent_nor_exported(model_path: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    with_head = {"algorithm": "ppo", "critic": {"form": "head"}, **values}
    head, plain = (create_learner(settings(**each), model_path, Run()) for each in (with_head, values))
    assert [name for name, _ in head.weights()] == [name for name, _ in plain.weights()]
    assert head.weight_specs() == plain.weight_specs()
    head.export(tmp_path / "head")
    plain.export(tmp_path / "plain")
    names, expected = ({path.name for path in (tmp_path / folder).iterdir()} for folder in ("head", "plain"))
    assert names == expected
    exported, expected = (load_file(tmp_path / folder / "model.safetensors") for folder in ("head", "plain"))
    assert exported.keys() == expected.keys()
