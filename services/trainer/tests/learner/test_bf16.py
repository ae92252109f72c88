"""Under every plugin bf16 is for products: rotary frequencies and the optimizer's weights are the folder's, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_helpers import Run, settings
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quartet_trainer.learner import create_learner


@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_fsdp", "low_level_zero", "gemini", "hybrid_parallel"])
def test_what_is_not_rounded(model_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[torch.nn.Module] = []
    load = AutoModelForCausalLM.from_pretrained

    def keep(*arguments, **options):
        models.append(load(*arguments, **options))
        return models[-1]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", keep)
    learner = create_learner(settings(plugin=plugin, precision="bf16", kl_coefficient=0.1), model_path, Run())
    exact = dict(load(model_path).named_buffers())
    assert len(models) == 2, "the policy and the reference model"
    for model in models:
        found = {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in model.named_buffers()}
        assert found.keys() == exact.keys()
        assert all(torch.equal(found[name], exact[name]) for name in exact)
    folder = load_file(model_path / "model.safetensors")
    assert all(torch.equal(tensor, folder[name]) for name, tensor in learner._plugin.weights())
