"""PPO with a value head on the policy: loss, gradient, clip, checkpoint, what is sent and exported, what is refused.

Several updates: `test_mini_batches`. Micro-batches, ranks and ZeRO: `test_spread_algorithms`, case "value head". Killed
while saving: `test_checkpoints`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import VOCABULARY, Run, make_batch, settings
from pydantic import ValidationError
from reference import SharedTrunk, batch_loss, load
from safetensors.torch import load_file
from torch import Tensor

from quartet_trainer.batches import decode_groups
from quartet_trainer.learner import LearnerError, LearnerSettings, create_learner
from quartet_trainer.learner.metrics import CRITIC

HEAD: dict[str, Any] = {
    "algorithm": "ppo",
    "max_mean_ratio": 0,
    "critic": {"form": "head", "learning_rate": 1e-2},
}


def shifted(learner: Any, scale: float = 0.05) -> Any:
    """The learner off its first weights, and with a head that says something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in (learner._causal_lm, learner._plugin.value_head):
            for parameter in module.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return learner


def head_of(learner: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in learner._plugin.value_head.named_parameters()}


@pytest.mark.parametrize("coefficient", [0.1, 2.0])
def test_one_backward_has_the_gradient_of_both_losses(model_path: Path, coefficient: float) -> None:
    groups = make_batch(seed=61)
    values = {**HEAD, "kl_coefficient": 0.1, "critic": {"form": "head", "value_coefficient": coefficient}}
    learner = shifted(create_learner(settings(**values), model_path, Run()))
    model, reference = (load(model_path) for _ in range(2))
    model.load_state_dict(learner._causal_lm.state_dict())
    critic = SharedTrunk(model, learner._plugin.value_head)
    loss, value_loss = batch_loss(
        model, groups, "ppo", reference=reference, critic=critic, beta=0.1, kl="k1", kl_in="reward"
    )
    of_policy = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    (loss + coefficient * value_loss).backward()
    # The value loss reaches the trunk: without it the gradient is another.
    assert any((alone - p.grad).abs().max() > 1e-3 for alone, p in zip(of_policy, model.parameters(), strict=True))

    batch = decode_groups(groups, VOCABULARY)
    plan, targets, _ = learner._planner.plan(batch)
    learner._accumulator.run(batch, plan, 0, targets)
    for ours, theirs in ((learner._causal_lm, model), (learner._plugin.value_head, critic.head)):
        for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            # transformers' norms are in float32: one backward through the trunk and two differ by their rounding.
            torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: n + m)
    assert critic.head.weight.grad.abs().max() > 1e-3
    learner._optimizer.zero_grad()
    metrics = learner.train_step(groups)
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-9)
    assert metrics["value_loss"] == pytest.approx(value_loss.item(), abs=1e-9)
    assert metrics["computed_tokens"] == metrics["trained_tokens"]


def test_one_pass_gives_values_and_old_log_probs(model_path: Path) -> None:
    """What is computed together is what each by itself is."""
    batch = decode_groups(make_batch(seed=63), VOCABULARY)
    kl = {"kl_coefficient": 0.1, "micro_batch_tokens": 60}
    together = shifted(create_learner(settings(**HEAD, **kl, old_log_probs="recompute"), model_path, Run()))
    alone = shifted(create_learner(settings(**HEAD, **kl), model_path, Run()))
    found, expected = together._planner._estimate(batch), alone._planner._estimate(batch)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-12, atol=1e-12)
    assert found.values[batch.loss_mask].abs().max() > 0.01
    assert found.metrics["kl"] != expected.metrics["kl"], "of the trainer's log-probs, and of the rollout's"


def test_the_head_starts_at_zero_and_learns_at_its_own_rate(model_path: Path) -> None:
    """The same batch again and again, the trunk held still: the head alone comes to explain the returns."""
    critic = {"form": "head", "learning_rate": 5e-2, "value_clip": 0.0, "value_coefficient": 1.0}
    values = {**HEAD, "critic": critic, "learning_rate": 0.0, "gae_lambda": 1.0}
    learner = create_learner(settings(**values), model_path, Run())
    assert all(not tensor.any() for tensor in head_of(learner).values())
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    groups = make_batch(seed=33, groups=2, size=2, longest=6)  # fewer tokens than the head has weights
    metrics = [learner.train_step(groups) for _ in range(25)]
    assert metrics[0]["value_mean"] == 0.0
    assert metrics[-1]["value_loss"] < 0.5 * metrics[0]["value_loss"]
    assert metrics[-1]["value_explained_variance"] > 0.5
    assert set(CRITIC[:-2]) <= metrics[0].keys()
    assert not set(CRITIC[-2:]) & metrics[0].keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())


def test_a_skipped_update_leaves_the_head(model_path: Path) -> None:
    learner = shifted(create_learner(settings(**{**HEAD, "max_mean_ratio": 1e-9}), model_path, Run()))
    before = head_of(learner)
    assert learner.train_step(make_batch(seed=64))["update_skipped"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in head_of(learner).items())


@pytest.mark.parametrize("values", [{}, {"lora": {"r": 4, "target_modules": ["q_proj"]}}], ids=["whole", "adapter"])
def test_it_goes_on_from_a_checkpoint_and_is_nowhere_else(model_path: Path, tmp_path: Path, values: Any) -> None:
    """By `snapshot`, written when two more steps are done: what the head was at its step, to the last bit."""
    learner = create_learner(settings(**HEAD, **values), model_path, Run())
    learner.train_step(make_batch(seed=65))
    write = learner.snapshot({})
    expected = [learner.train_step(make_batch(seed=seed)) for seed in (66, 67)]
    write(tmp_path / "checkpoint")
    again = create_learner(settings(**HEAD, **values), model_path, Run())
    again.load(tmp_path / "checkpoint")
    for metrics, seed in zip(expected, (66, 67), strict=True):
        found = again.train_step(make_batch(seed=seed))
        for name in ("loss", "value_loss", "value_mean", "grad_norm"):
            assert found[name] == metrics[name], name
    ours, theirs = again._critic.copies(), learner._critic.copies()
    assert ours.keys() == theirs.keys() >= {"model/weight", "model/bias", "exp_avg/weight", "step/bias"}
    assert all(torch.equal(tensor, theirs[name]) and tensor.any() for name, tensor in ours.items())

    plain = create_learner(settings(**values), model_path, Run())
    assert [name for name, _ in learner.weights()] == [name for name, _ in plain.weights()]
    assert [name for name, *_ in learner.weight_specs()] == [name for name, _ in plain.weights()]
    learner.export(tmp_path / "export")
    plain.export(tmp_path / "plain")
    names = {path.name for path in (tmp_path / "plain").iterdir()}
    assert {path.name for path in (tmp_path / "export").iterdir()} == names
    exported, without = (load_file(tmp_path / folder / "model.safetensors") for folder in ("export", "plain"))
    assert exported.keys() == without.keys()


def test_another_forms_checkpoint_is_refused(model_path: Path, tmp_path: Path) -> None:
    separate = {**HEAD, "critic": {}}
    for name, values in (("head", HEAD), ("separate", separate)):
        create_learner(settings(**values), model_path, Run()).save(tmp_path / name, {})
    with pytest.raises(LearnerError, match=r"has no value head; it was not written with critic\.form = 'head'"):
        create_learner(settings(**HEAD), model_path, Run()).load(tmp_path / "separate")
    with pytest.raises(LearnerError, match="head has no critic; it was not written by a training with one"):
        create_learner(settings(**separate), model_path, Run()).load(tmp_path / "head")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"plugin": "hybrid_parallel"}, 'needs plugin = "torch_ddp" or "low_level_zero", not \'hybrid_parallel\''),
        ({"plugin": "torch_fsdp"}, 'needs plugin = "torch_ddp" or "low_level_zero", not \'torch_fsdp\''),
        ({"plugin": "gemini", "precision": "bf16"}, 'needs plugin = "torch_ddp" or "low_level_zero", not \'gemini\''),
        ({"critic": {"form": "head", "model": "somewhere"}}, "a head has no model but the policy"),
        ({"critic": {"form": "shared"}}, "'separate' or 'head'"),
        ({"critic": {"form": "head", "value_coefficient": 0}}, "greater than 0"),
    ],
)
def test_what_is_not_there_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LearnerSettings(**{**HEAD, **values})


def test_bf16_is_near(model_path: Path) -> None:
    exact, rough = (
        shifted(create_learner(settings(**{**HEAD, "precision": precision}), model_path, Run()), 0.01)
        for precision in ("fp64", "bf16")
    )
    expected, metrics = exact.train_step(make_batch(seed=68)), rough.train_step(make_batch(seed=68))
    assert metrics["value_mean"] == pytest.approx(expected["value_mean"], abs=0.02)
    assert metrics["value_loss"] == pytest.approx(expected["value_loss"], rel=0.05)
    assert rough._plugin.value_head.weight.dtype == torch.float32
