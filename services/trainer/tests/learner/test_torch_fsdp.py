"""What torch_fsdp has of its own; `test_plugins` and `test_spread_algorithms` run it on several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_helpers import Run, make_batch, settings
from test_invariance import comparable
from transformers import Qwen2ForCausalLM

from quartet_trainer.learner import LearnerError, create_learner


def test_one_rank_is_one_process(model_path: Path, tmp_path: Path) -> None:
    values = {"micro_batch_tokens": 60, "max_grad_norm": 0.5, "weight_decay": 0.5}
    plugins = ("torch_fsdp", "torch_ddp")
    fsdp, alone = (create_learner(settings(**values, plugin=plugin), model_path, Run()) for plugin in plugins)
    for learner in (fsdp, alone):
        learner.train_step(make_batch(seed=61))
    alone.save(tmp_path / "checkpoint", {})
    fsdp.load(tmp_path / "checkpoint")
    seen, expected = (comparable(learner.train_step(make_batch(seed=62))) for learner in (fsdp, alone))
    assert seen == pytest.approx(expected, rel=1e-9)
    for (name, ours), (_, theirs) in zip(fsdp.weights(), alone.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=name)


def test_weight_decay_is_on_matrices_only(model_path: Path) -> None:
    """The plugin would start the optimizer anew, with one group and another decay."""
    learner = create_learner(settings(weight_decay=0.5, plugin="torch_fsdp"), model_path, Run())
    decay = {id(p): group["weight_decay"] for group in learner._optimizer.param_groups for p in group["params"]}
    for name, parameter in learner._plugin.parameters():
        assert decay[id(parameter)] == (0.5 if len(learner._plugin.specs[name]) == 2 else 0.0), name


def test_a_family_that_names_no_layers_is_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen2ForCausalLM, "_no_split_modules", ["Block"])
    with pytest.raises(LearnerError, match="'torch_fsdp' cannot tell the layers of a 'qwen2' model: it has none of"):
        create_learner(settings(plugin="torch_fsdp"), model_path, Run())
