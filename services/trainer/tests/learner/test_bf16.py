"""Under every plugin bf16 is for products: rotary frequencies and the optimizer's weights are the folder's, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from learner_helpers import make_batch, make_learner, make_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from quartet_trainer.learner.model import Policy


@pytest.mark.parametrize("plugin", ["torch_ddp", "torch_fsdp", "low_level_zero", "gemini", "hybrid_parallel"])
def test_bf16_loading_keeps_buffers_and_master_weights_exact(
    model_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models: list[torch.nn.Module] = []
    load = AutoModelForCausalLM.from_pretrained

    def keep(*arguments, **options):
        loaded = load(*arguments, **options)
        models.append(loaded[0])
        return loaded

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", keep)
    learner = make_learner(model_path, plugin=plugin, precision="bf16", kl_coefficient=0.1)
    exact = dict(load(model_path).named_buffers())
    assert len(models) == 2, "the policy and the reference model"
    for model in models:
        found = {name.replace("_fsdp_wrapped_module.", ""): buffer for name, buffer in model.named_buffers()}
        assert found.keys() == exact.keys()
        assert all(torch.equal(found[name], exact[name]) for name in exact)
    folder = load_file(model_path / "model.safetensors")
    assert all(torch.equal(tensor, folder[name]) for name, tensor in learner._plugin.weights())


def test_log_probs_of_a_bf16_model_are_its_logits_own(tmp_path: Path) -> None:
    """What bf16 rounds are the logits; log-softmax of them, entropy and temperature are float32's."""
    path = make_model(tmp_path / "model", initializer_range=0.5)
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
    ids = torch.arange(12)[None] * 5 % 64
    columns, targets = torch.arange(11), ids[0, 1:]
    temperatures = torch.linspace(0.5, 2.0, 11)
    with torch.no_grad():
        log_probs, entropy = Policy(model)(ids, torch.zeros(11).long(), columns, None, targets, temperatures)
        logits = model(input_ids=ids).logits[0, :-1].double() / temperatures[:, None].double()
    assert log_probs.dtype == entropy.dtype == torch.float32
    exact = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(log_probs.double(), exact.log_prob(targets), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(entropy.double(), exact.entropy(), rtol=1e-6, atol=2e-6)


GEMINI = {"plugin": "gemini", "precision": "bf16"}
"""It computes in bf16 alone; on several ranks: `test_plugins`."""


def test_a_step_that_is_not_taken_leaves_no_gradient(model_path: Path) -> None:
    learner, other = (make_learner(model_path, **GEMINI, algorithm="dapo") for _ in range(2))
    usual, learner._algorithm = learner._algorithm, learner._algorithm.model_copy(update={"max_mean_ratio": 1e-6})
    assert learner.train_step(make_batch(seed=72))["update_skipped"] == 1.0
    learner._algorithm = usual
    seen, expected = (one.train_step(make_batch(seed=71)) for one in (learner, other))
    assert (seen["grad_norm"], seen["loss"]) == pytest.approx((expected["grad_norm"], expected["loss"]), rel=1e-9)
