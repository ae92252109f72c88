"""Every algorithm, end to end through the learner, against `reference`, which shares no code with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import VOCABULARY, Run, gradients, make_batch, make_group, make_model, settings
from reference import batch_loss, load

from quartet_common.tensors import encode_ragged
from quartet_trainer.algorithms import ALGORITHMS
from quartet_trainer.batches import decode_groups
from quartet_trainer.learner import create_learner
from quartet_trainer.learner.metrics import CRITIC, METRICS


def whole(mean: bool, cap: float):
    def factors(w: torch.Tensor) -> torch.Tensor:
        weight = torch.exp(torch.log(w).mean() if mean else torch.log(w).sum()) if len(w) else torch.zeros(())
        return (weight if weight <= cap else torch.zeros(())).expand(len(w))

    return factors


RECOMPUTE = {"old_log_probs": "recompute"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "grpo": ("grpo", {}, {}),
    "grpo as in its paper": (
        "grpo",
        {"aggregation": "sequence-mean-token-mean"},
        {"aggregation": "sequence-mean-token-mean"},
    ),
    "grpo, narrow clip": ("grpo", {"clip_low": 0.05, "clip_high": 0.5}, {"low": 0.05, "high": 0.5}),
    "grpo, recomputed": ("grpo", {"tis_cap": 0.0, **RECOMPUTE}, {"recompute": True}),
    "grpo, truncated importance sampling": (
        "grpo",
        {"tis_cap": 1.5, **RECOMPUTE},
        {"recompute": True, "correct": lambda w: w.clamp(max=1.5)},
    ),
    "dapo": ("dapo", {}, {"high": 0.28, "mask_truncated": True}),
    "rloo": ("rloo", {}, {}),
    "cispo, its own clip": ("cispo", {}, {"high": 4.0}),
    "grpo, k3 in the loss": ("grpo", {"kl_coefficient": 0.3}, {"beta": 0.3}),
    "grpo, k1 in the loss": ("grpo", {"kl_coefficient": 0.3, "kl_estimator": "k1"}, {"beta": 0.3, "kl": "k1"}),
    "grpo, dual clip": ("grpo", {"dual_clip": 1.5}, {"dual": 1.5}),
    "dr_grpo": ("dr_grpo", {}, {}),
    "dapo, truncated ones trained": ("dapo", {"mask_truncated": False}, {"high": 0.28}),
    "rloo, k1 in the reward": (
        "rloo",
        {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
        {"beta": 0.1, "kl_in": "reward", "kl": "k1"},
    ),
    "reinforce_pp": ("reinforce_pp", {"kl_coefficient": 0.1}, {"beta": 0.1, "kl_in": "reward", "kl": "k1"}),
    "reinforce_pp, recomputed": (
        "reinforce_pp",
        {"kl_coefficient": 0.1, "correction": "none", **RECOMPUTE},
        {"beta": 0.1, "kl_in": "reward", "kl": "k1", "recompute": True},
    ),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {"kl_coefficient": 0.1}, {"beta": 0.1, "kl": "k2"}),
    "reinforce_pp_baseline as ColossalChat's": (
        "reinforce_pp_baseline",
        {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k3"},
        {"beta": 0.1, "kl_in": "reward", "kl": "k3"},
    ),
    "gspo": ("gspo", {}, {"low": 3e-4, "high": 4e-4, "recompute": True, "correct": lambda w: w.clamp(max=2)}),
    "gspo, to the rollout": ("gspo", {"old_log_probs": "rollout"}, {"low": 3e-4, "high": 4e-4}),
    "gspo, wide": (
        "gspo",
        {"old_log_probs": "rollout", "clip_low": 0.8, "clip_high": 3.0},
        {"low": 0.8, "high": 3.0},
    ),
    "cispo": ("cispo", {"clip_high": 0.5}, {"high": 0.5}),
    "ppo": ("ppo", {"kl_coefficient": 0.1, "max_mean_ratio": 0}, {"beta": 0.1, "kl_in": "reward", "kl": "k1"}),
    "icepop": (
        "grpo",
        {"correction": "icepop", **RECOMPUTE},
        {"recompute": True, "correct": lambda w: w * ((w >= 0.5) & (w <= 5))},
    ),
    "sequence mask, product": (
        "grpo",
        {"correction": "sequence-mask", "sequence_mask_cap": 0.05, **RECOMPUTE},
        {"recompute": True, "correct": whole(mean=False, cap=0.05)},
    ),
    "sequence mask, geometric mean": (
        "grpo",
        {"correction": "sequence-mask", "sequence_mask_mean": "geometric", "sequence_mask_cap": 0.25, **RECOMPUTE},
        {"recompute": True, "correct": whole(mean=True, cap=0.25)},
    ),
}


def extremes() -> list[Any]:
    """A batch with a completion without any trained token, a whole group of such, completions of one token, a group
    of equal rewards, ratios of e^14 and of e^-12, and a huge reward."""
    rng = np.random.default_rng(61)

    def rows(group: Any, values: list[list[Any]], dtype: Any) -> Any:
        return encode_ragged([np.asarray(row, dtype=dtype) for row in values], group.dtype)

    masked = make_group(rng, [3, 2, 4], mask=True)
    masked.loss_mask.CopyFrom(rows(masked.loss_mask, [[1, 0, 1], [0, 0], [1, 1, 1, 0]], np.uint8))
    none = make_group(rng, [2, 3], mask=True)
    none.loss_mask.CopyFrom(rows(none.loss_mask, [[0, 0], [0, 0, 0]], np.uint8))
    ones = make_group(rng, [1, 1, 1], prompt=1)
    equal = make_group(rng, [4, 2], rewards=[0.1, 0.1])
    huge = make_group(rng, [3, 3], rewards=[50.0, -2.0])
    huge.rollout_log_probs.CopyFrom(rows(huge.rollout_log_probs, [[-18.0, -4.0, -18.0]] * 2, np.float32))
    rare = make_group(rng, [3, 3], rewards=[1.0, -1.0])
    rare.rollout_log_probs.CopyFrom(rows(rare.rollout_log_probs, [[-1e-4, 0.0, -3.0]] * 2, np.float32))
    return [masked, none, ones, equal, huge, rare]


def moved(learner: Any) -> Any:
    """The learner with weights that are no longer the reference's, and a value head that says something."""
    generator = torch.Generator().manual_seed(1)
    models = [learner._causal_lm] + ([learner._critic._model.unwrap().head] if learner._critic else [])
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return learner


def test_every_algorithm_has_a_case() -> None:
    assert {algorithm for algorithm, _, _ in CASES.values()} == ALGORITHMS.keys()


@pytest.mark.parametrize("batch", [make_batch(seed=31), extremes()], ids=["ordinary", "extremes"])
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient(model_path: Path, case: str, batch: list[Any]) -> None:
    algorithm, ours, theirs = CASES[case]
    learner = moved(create_learner(settings(algorithm=algorithm, **ours), model_path, Run()))
    model, reference = (load(model_path) for _ in range(2))
    model.load_state_dict(learner._causal_lm.state_dict())
    critic = learner._critic._model.unwrap() if learner._critic else None
    loss, value_loss = batch_loss(model, batch, algorithm, reference=reference, critic=critic, **theirs)
    loss.backward()
    found = gradients(learner, batch)
    assert found.keys() == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        near = {"rtol": 1e-6, "atol": 1e-9 + 1e-7 * float(parameter.grad.abs().max())}
        torch.testing.assert_close(found[name], parameter.grad, **near, msg=lambda m, n=name: f"{n}: {m}")
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-4
    metrics = learner.train_step(batch)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)
    if critic is not None:
        assert metrics["value_loss"] == pytest.approx(value_loss.item(), rel=1e-9, abs=1e-9)
    if ours.get("correction") in ("icepop", "sequence-mask"):
        assert 0 < metrics["dropped_ratio"] < 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_batch_without_a_trained_token_changes_nothing(model_path: Path, algorithm: str) -> None:
    learner = create_learner(settings(algorithm=algorithm, kl_coefficient=0.1), model_path, Run())
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    metrics = learner.train_step([extremes()[1]])
    assert metrics["loss"] == metrics["grad_norm"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    for name, tensor in learner.weights():
        assert torch.equal(tensor, before[name]), name


def test_kl_to_the_first_weights(model_path: Path) -> None:
    """After a step the policy has left its reference, which stays."""
    groups = make_batch(seed=6)
    learner = create_learner(settings(kl_coefficient=0.3), model_path, Run())
    first = learner.train_step(groups)
    assert first["kl"] == pytest.approx(0.0, abs=1e-12)
    model, reference = (load(model_path) for _ in range(2))
    model.load_state_dict(learner._causal_lm.state_dict())
    loss = batch_loss(model, groups, reference=reference, beta=0.3)[0]
    loss.backward()
    found = gradients(learner, groups)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-6, atol=1e-9)
    second = learner.train_step(groups)
    assert second["loss"] == pytest.approx(loss.item(), abs=1e-9)
    assert second["kl"] > 0
    assert second["completions_skipped"] == 0  # with a KL, completions without advantage move the gradient too


def test_the_same_curve_for_twenty_steps(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", seed=1)
    batches = [make_batch(seed=100 + step, longest=12) for step in range(20)]
    model = load(path, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    expected = []
    for groups in batches:
        loss, _ = batch_loss(model, groups)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        expected.append(loss.item())
    learner = create_learner(settings(precision="fp32", learning_rate=3e-3, max_grad_norm=1.0), path, Run())
    found = [learner.train_step(groups)["loss"] for groups in batches]
    assert found == pytest.approx(expected, abs=1e-4)
    assert learner.step == 20


def test_every_metric_has_a_documented_name(model_path: Path) -> None:
    plain = create_learner(settings(), model_path, Run()).train_step(make_batch())
    with_kl = create_learner(settings(kl_coefficient=0.1), model_path, Run()).train_step(make_batch())
    assert plain.keys() == METRICS.keys() - {"kl", "ptx_loss", *CRITIC}
    assert with_kl.keys() == plain.keys() | {"kl"}
    assert all(isinstance(value, float) for value in with_kl.values())


def test_gspo_takes_its_ratio_to_the_policy_before_the_step(model_path: Path) -> None:
    """Rollouts whose log-probs are off by as little as arithmetic makes them would else lose their gradient."""
    groups = make_batch(seed=39)
    metrics = {
        chosen: create_learner(settings(algorithm="gspo", old_log_probs=chosen), model_path, Run()).train_step(groups)
        for chosen in (None, "recompute", "rollout")
    }
    assert metrics[None]["clip_ratio_low"] == metrics[None]["clip_ratio_high"] == 0.0 < metrics[None]["grad_norm"]
    assert metrics[None]["ratio_mean"] == pytest.approx(1.0, abs=1e-12)
    assert metrics[None]["loss"] == metrics["recompute"]["loss"] != metrics["rollout"]["loss"]
    assert metrics["rollout"]["clip_ratio_low"] + metrics["rollout"]["clip_ratio_high"] > 0.3


def test_the_critics_gradient(model_path: Path) -> None:
    groups = make_batch(seed=32)
    learner = moved(create_learner(settings(algorithm="ppo", kl_coefficient=0.1), model_path, Run()))
    critic, model = learner._critic._model.unwrap(), load(model_path)
    model.load_state_dict(learner._causal_lm.state_dict())
    _, loss = batch_loss(
        model, groups, "ppo", reference=load(model_path), critic=critic, beta=0.1, kl="k1",
        kl_in="reward",
    )  # fmt: skip
    expected = torch.autograd.grad(loss, list(critic.parameters()))
    batch = decode_groups(groups, VOCABULARY)
    learner._critic.accumulate(batch, learner._planner.plan(batch)[1])
    for (name, parameter), gradient in zip(critic.named_parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_a_critic_learns_the_returns(model_path: Path) -> None:
    """The same batch again and again, the policy held still: its values come to explain the returns."""
    values = {"learning_rate": 0.0, "critic": {"learning_rate": 3e-3, "value_clip": 0.0}, "gae_lambda": 1.0}
    learner = create_learner(settings(algorithm="ppo", max_mean_ratio=0, **values), model_path, Run())
    metrics = [learner.train_step(make_batch(seed=33)) for _ in range(30)]
    assert set(CRITIC) <= metrics[0].keys()
    assert metrics[0]["value_mean"] == 0.0
    assert metrics[-1]["value_loss"] < 0.5 * metrics[0]["value_loss"]
    assert metrics[-1]["value_explained_variance"] > 0.5


def test_the_entropy_bonus(model_path: Path) -> None:
    groups = make_batch(seed=34)
    learner = moved(create_learner(settings(entropy_coefficient=0.7), model_path, Run()))
    plain = moved(create_learner(settings(skip_zero_advantage=False), model_path, Run()))
    bonus = {name: g - gradients(plain, groups)[name] for name, g in gradients(learner, groups).items()}

    batch = decode_groups(groups, VOCABULARY)
    model = load(model_path)
    model.load_state_dict(learner._causal_lm.state_dict())
    total = torch.zeros((), dtype=torch.float64)
    prompts = batch.tokens.numel() - batch.rows.numel()
    for row in range(batch.completions):
        prompt = batch.tokens[batch.prompt_starts[row] : batch.prompt_starts[row] + batch.prompt_lengths[row]]
        begin, length = int(batch.completion_starts[row]), int(batch.completion_lengths[row])
        ids = torch.cat([prompt, batch.tokens[prompts + begin : prompts + begin + length]])[None].long()
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / float(batch.temperatures[row])
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        total = total + entropy[batch.loss_mask[begin : begin + length]].sum()
    (-0.7 * total / batch.loss_mask.sum()).backward()
    for name, parameter in model.named_parameters():
        # transformers' norms are in float32: the difference of two gradients shows it.
        torch.testing.assert_close(bonus[name], parameter.grad, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    mean = float(total.detach() / batch.loss_mask.sum())
    assert learner.train_step(groups)["entropy"] == pytest.approx(mean, abs=1e-9)


def test_a_ratio_too_high_changes_no_weight(model_path: Path) -> None:
    groups = make_batch(seed=35)
    learner = create_learner(settings(max_mean_ratio=0.5), model_path, Run())
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    metrics = learner.train_step(groups)
    assert metrics["ratio_mean"] > 0.5
    assert metrics["update_skipped"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.weights())
    assert create_learner(settings(max_mean_ratio=1e9), model_path, Run()).train_step(groups)["update_skipped"] == 0.0


def test_a_critic_goes_on_from_a_checkpoint(model_path: Path, tmp_path: Path) -> None:
    values = {"algorithm": "ppo", "max_mean_ratio": 0, "critic": {"learning_rate": 1e-2}}
    learner = create_learner(settings(**values), model_path, Run())
    learner.train_step(make_batch(seed=36))
    learner.save(tmp_path / "checkpoint", {})
    expected = [learner.train_step(make_batch(seed=seed)) for seed in (37, 38)]
    again = create_learner(settings(**values), model_path, Run())
    again.load(tmp_path / "checkpoint")
    for metrics, seed in zip(expected, (37, 38), strict=True):
        found = again.train_step(make_batch(seed=seed))
        for name in ("loss", "value_loss", "value_mean", "critic_grad_norm"):
            assert found[name] == pytest.approx(metrics[name], abs=1e-12), name
