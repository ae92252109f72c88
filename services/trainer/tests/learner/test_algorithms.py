"""Every algorithm, end to end through the learner, against `reference`, which shares no code with it."""

from __future__ import annotations

import doctest
import inspect
import math
from collections.abc import Sequence
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import (
    VOCABULARY,
    all_parameters,
    assert_near,
    gradients,
    make_batch,
    make_group,
    make_learner,
    settings,
)
from pydantic import ValidationError
from reference import DEFAULTS, OF_ALGORITHM, OF_GROUP, SharedTrunk, batch_loss, load

from quartet_common.tensors import decode, encode, encode_ragged
from quartet_trainer import algorithms
from quartet_trainer.algorithms import ALGORITHMS, Algorithm, Scored, read_algorithm
from quartet_trainer.batch import decode_groups
from quartet_trainer.learner import model as model_module
from quartet_trainer.learner.metrics import METRICS


def own_advantages(algorithm: Algorithm, rewards: Sequence[float]) -> list[float]:
    return algorithm.completion_advantages(torch.tensor(rewards).double(), torch.zeros(len(rewards)).long()).tolist()


for _name in ALGORITHMS.keys() - {"grpo", *OF_ALGORITHM}:
    # The reference does not have its advantages, which its example tests: all else is the reference's.
    OF_ALGORITHM[_name] = read_algorithm(_name).model_dump(include=set(DEFAULTS))
    OF_GROUP[_name] = partial(own_advantages, read_algorithm(_name))

RECOMPUTE = {"old_log_probs": "recompute"}
SEQUENCES = {"correction": "sequence-mask", **RECOMPUTE}
PPO = {"algorithm": "ppo", "kl_coefficient": 0.1, "max_mean_ratio": 0}
CASES: list[dict[str, Any]] = [
    *({"algorithm": algorithm} for algorithm in ALGORITHMS if algorithm != "ppo"),
    {"clip_low": 0.05, "clip_high": 0.5},
    {"dual_clip": 1.5},
    {"gradient_checkpointing": True},
    {"entropy_coefficient": 0.7},
    {"kl_coefficient": 0.3, "kl_estimator": "k1"},
    {"tis_cap": 0.0, **RECOMPUTE},
    {"tis_cap": 1.5, **RECOMPUTE},
    {"correction": "icepop", **RECOMPUTE},
    {"sequence_mask_cap": 0.05, **SEQUENCES},
    {"sequence_mask_cap": 0.25, "sequence_mask_mean": "geometric", **SEQUENCES},
    {"algorithm": "dapo", "mask_truncated": False},
    {"algorithm": "rloo", "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    {"algorithm": "reinforce_pp", "kl_coefficient": 0.1, "correction": "none", **RECOMPUTE},
    {"algorithm": "reinforce_pp_baseline", "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k3"},
    {"algorithm": "gspo", "old_log_probs": "rollout", "clip_low": 0.8, "clip_high": 3.0},
    {"algorithm": "rloo_sequence", "old_log_probs": "rollout", "clip_low": 0.8, "clip_high": 3.0, "dual_clip": 4.0},
    {"algorithm": "cispo", "clip_high": 0.5},
    {"algorithm": "dppo", "kl_coefficient": 0.3},
    PPO,
    {**PPO, "critic": {"form": "head", "value_coefficient": 2.0}},
    {**PPO, "critic": {"form": "head"}, "correction": "none", **RECOMPUTE},
]


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


def zero_or_one(batch: list[Any]) -> list[Any]:
    """The batch with rewards as MaxRL means them: 1 where they are positive."""
    copies = [type(group).FromString(group.SerializeToString()) for group in batch]
    for group in copies:
        group.rewards.CopyFrom(encode((decode(group.rewards) > 0).astype(np.float32)))
    return copies


def moved(learner: Any) -> Any:
    """The learner with weights that are not the reference's, and a critic that says something."""
    generator = torch.Generator().manual_seed(1)
    heads = [learner._plugin.value_head] if learner._plugin.value_head is not None else []
    if learner._critic and not heads:
        heads = [learner._critic._model.unwrap().head]
    with torch.no_grad():
        for model in (learner._causal_lm, *heads):
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return learner


def assert_gradients(found: dict[str, torch.Tensor], loss: torch.Tensor, of: dict[str, torch.Tensor]) -> None:
    """`found` are a loss's, by name."""
    wanted = torch.autograd.grad(loss, list(of.values()), retain_graph=True)
    assert found.keys() == of.keys()
    for name, expected in zip(of, wanted, strict=True):
        assert_near({name: found[name]}, {name: expected}, rtol=1e-6, atol=1e-9 + 1e-7 * float(expected.abs().max()))
    assert max(float(gradient.abs().max()) for gradient in wanted) > 1e-4


@pytest.mark.parametrize(
    ("batch", "micro_batch_tokens", "logits_at_once"),
    [(make_batch(seed=31), 100_000, 1 << 26), (extremes(), 20, 5 * VOCABULARY)],
    ids=["ordinary", "extremes, cut small"],
)
@pytest.mark.parametrize("values", CASES, ids=str)
def test_algorithm_loss_and_gradient_equal_reference(
    model_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: dict[str, Any],
    batch: list[Any],
    micro_batch_tokens: int,
    logits_at_once: int,
) -> None:
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", logits_at_once)
    batch = zero_or_one(batch) if values.get("algorithm") == "max_rl" else batch
    learner = moved(make_learner(model_path, micro_batch_tokens=micro_batch_tokens, **values))
    model, reference = (load(model_path) for _ in range(2))
    model.load_state_dict(learner._causal_lm.state_dict())
    head, critic, coefficient = learner._plugin.value_head, None, 0.0
    if head is not None:
        critic, coefficient = SharedTrunk(model, head), learner._settings.algorithm.critic.value_coefficient
    elif learner._critic:
        critic = learner._critic._model.unwrap()
    loss, value_loss = batch_loss(model, batch, values, reference=reference, critic=critic)
    expected = dict(model.named_parameters())
    if head is not None:
        expected |= {f"value_head.{name}": parameter for name, parameter in critic.head.named_parameters()}
    assert_gradients(gradients(learner, batch), loss + coefficient * value_loss, expected)
    if critic is not None and head is None:
        decoded = decode_groups(batch, VOCABULARY)
        learner._critic.accumulate(decoded, learner._planner.updates(decoded, 0)[1][0].targets)
        found = {name: parameter.grad for name, parameter in critic.named_parameters()}
        assert_gradients(found, value_loss, dict(critic.named_parameters()))
    metrics = learner.train_step(batch)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-9, abs=1e-9)
    if critic is not None:
        assert metrics["value_loss"] == pytest.approx(value_loss.item(), rel=1e-9, abs=1e-9)
    assert (metrics["micro_batches"] > 1) == (micro_batch_tokens == 20)
    if values.get("correction") in ("icepop", "sequence-mask"):
        assert 0 < metrics["dropped_ratio"] < 1


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_docstring_shows_its_advantages(name: str) -> None:
    algorithm = read_algorithm(name)

    def advantages(*groups: Sequence[float]) -> list[float]:
        """Of completions of one token, by groups of rewards."""
        rewards = torch.tensor([reward for group in groups for reward in group]).double()
        of = torch.arange(len(groups)).repeat_interleave(torch.tensor([len(group) for group in groups]))
        mask, zeros = torch.ones(len(rewards)).bool(), torch.zeros(len(rewards)).double()
        found = algorithm.advantages(Scored(rewards, of, torch.arange(len(rewards)), mask, zeros, zeros)).advantages
        return [round(value, 2) + 0.0 for value in found.tolist()]

    text = inspect.getdoc(type(algorithm)) or ""
    test = doctest.DocTestParser().get_doctest(text, {"advantages": advantages}, name, None, None)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_a_batch_without_any_advantage_is_a_step_with_gradient_zero(model_path: Path) -> None:
    """AdamW moves on by its momentum, exactly as it would had everything been computed."""
    learners = [make_learner(model_path, skip_zero_advantage=skip) for skip in (True, False)]
    flat = make_batch(seed=14)
    for group in flat:
        group.rewards.data = bytes(len(group.rewards.data))
    for learner, computed in zip(learners, (0.0, 1.0), strict=True):
        learner.train_step(make_batch(seed=15))
        before = {name: tensor.clone() for name, tensor in learner.weights()}
        metrics = learner.train_step(flat)
        assert metrics["grad_norm"] == metrics["loss"] == 0.0
        assert metrics["computed_tokens"] == computed * metrics["trained_tokens"] and metrics["trained_tokens"] > 0
        assert any((tensor != before[name]).any() for name, tensor in learner.weights())
    assert_near(*(dict(learner.weights()) for learner in learners), rtol=1e-6, atol=1e-9)


def test_a_name_that_two_packages_bring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints(EntryPoint("best", value, "quartet.algorithms") for value in ("one:best", "two:best"))
    monkeypatch.setattr(algorithms, "entry_points", points.select)
    with pytest.raises(ValidationError, match=r"several packages bring it \(one:best, two:best\); uninstall"):
        settings(algorithm="best")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("math:sqrt", "entry point math:sqrt: no algorithm: it must be a subclass of quartet_trainer.algorithms.Algo"),
        ("math:nothing", "entry point math:nothing: cannot be loaded: AttributeError"),
        (
            "quartet_trainer.algorithms:ClippedRatio",
            "ClippedRatio: no algorithm: it needs policy_loss, and completi",
        ),
        ("quartet_trainer.algorithms.builtin:RLOO", "name is 'rloo', its entry point's is 'best'; give both one name"),
    ],
)
def test_what_is_no_algorithm_is_refused(monkeypatch: pytest.MonkeyPatch, value: str, message: str) -> None:
    points = EntryPoints([EntryPoint("best", value, "quartet.algorithms")])
    monkeypatch.setattr(algorithms, "entry_points", points.select)
    with pytest.raises(ValidationError, match=message):
        settings(algorithm="best")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_batch_without_a_trained_token_changes_nothing(model_path: Path, algorithm: str) -> None:
    learner = make_learner(model_path, algorithm=algorithm, kl_coefficient=0.1)
    before = {name: tensor.clone() for name, tensor in learner.weights()}
    metrics = learner.train_step([extremes()[1]])
    assert metrics["loss"] == metrics["grad_norm"] == metrics["padding_ratio"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
    for name, tensor in learner.weights():
        assert torch.equal(tensor, before[name]), name


def test_every_metric_has_a_documented_name(model_path: Path) -> None:
    for values, parts in (
        ({}, {""}),
        ({"kl_coefficient": 0.1}, {"", "reference model"}),
        ({"kl_coefficient": 0.1, "kl_target": 0.1}, {"", "reference model", "KL target"}),
        ({"entropy_target": 0.1}, {"", "entropy target"}),
        ({"algorithm": "ppo"}, {"", "critic", "separate critic"}),
        ({"algorithm": "ppo", "critic": {"form": "head"}}, {"", "critic"}),
    ):
        metrics = make_learner(model_path, **values).train_step(make_batch())
        assert metrics.keys() == {name for name, metric in METRICS.items() if metric.only_with in parts}
        assert all(isinstance(value, float) for value in metrics.values())


@pytest.mark.parametrize("values", [{}, {"algorithm": "ppo", "critic": {"form": "head"}}], ids=["grpo", "value head"])
def test_a_ratio_too_high_changes_no_weight(model_path: Path, values: dict[str, Any]) -> None:
    groups = make_batch(seed=35)
    learner = moved(make_learner(model_path, max_mean_ratio=1e-3, **values))
    before = {name: parameter.detach().clone() for name, parameter in all_parameters(learner._plugin)}
    metrics = learner.train_step(groups)
    assert metrics["ratio_mean"] > 1e-3
    assert metrics["update_skipped"] == 1.0
    assert all(torch.equal(parameter, before[name]) for name, parameter in all_parameters(learner._plugin))
    assert make_learner(model_path, max_mean_ratio=1e9).train_step(groups)["update_skipped"] == 0.0


def test_accuracy_and_solved_groups_are_those_of_judged_answers(model_path: Path) -> None:
    groups = make_batch()
    for group in groups:
        group.ans_judged.CopyFrom(encode(np.zeros(4, dtype=np.uint8)))
    learner = make_learner(model_path)
    accuracy = ("ans_acc", "solve_none", "solve_all")
    assert not learner.train_step(groups).keys() & {*accuracy}
    right = (([1, 1, 0, 0], [1, 0, 0, 0]), ([0, 1, 0, 0], [0, 0, 0, 0]), ([0, 0, 0, 1], [0, 0, 0, 1]))
    for group, (judged, values) in zip(groups, right, strict=False):  # and none of the fourth
        group.ans_judged.CopyFrom(encode(np.array(judged, dtype=np.uint8)))
        group.ans_acc.CopyFrom(encode(np.array(values, dtype=np.float32)))
    metrics = learner.train_step(groups)
    assert [metrics[name] for name in accuracy] == pytest.approx([2 / 4, 1 / 3, 1 / 3])
