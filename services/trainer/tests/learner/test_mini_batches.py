"""Several optimizer steps a batch: those of a plain PyTorch loop that shares no code with the learner."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import assert_near, make_batch, make_learner
from reference import SharedTrunk, estimate, load, policy_losses, read, value_losses

EPOCHS, MINI_BATCHES, CLIP = 2, 2, 0.02
PASSES = {"epochs": EPOCHS, "mini_batches": MINI_BATCHES}


def plain_steps(
    model: Any, critic: Any, batches: list[list], algorithm: str, recompute: bool
) -> tuple[list[dict[str, float]], float]:
    """Train as PPO's paper has it: advantages, returns, old log-probs and values once a batch, then pass after pass.

    Returns the critic's metrics of each batch, if there is one, and the greatest distance of a ratio from 1.
    """
    groups_of = [{"params": list(model.parameters()), "lr": 1e-3}]
    if critic:
        shared = {id(parameter) for parameter in model.parameters()}
        groups_of.append({"params": [p for p in critic.parameters() if id(p) not in shared], "lr": 1e-2})
    optimizer = torch.optim.AdamW(groups_of, weight_decay=0.0)
    metrics, farthest = [], 0.0
    for step, groups in enumerate(batches):
        first = read(groups, model, None, critic)
        estimate(first, algorithm, 0.0, "k1", recompute)
        clipped, lost = [], []
        for epoch in range(EPOCHS):
            order = np.random.default_rng([42, step, epoch]).permutation(len(groups))
            for part in np.array_split(order, MINI_BATCHES):
                now = read(groups, model, None, critic)
                chosen = [(c, was) for c, was in zip(now, first, strict=True) if c.group in part]
                tokens = sum(len(c.lp) for c, _ in chosen)
                loss = torch.zeros((), dtype=torch.float64)
                for c, was in chosen:
                    old = was.old(recompute)
                    farthest = max([farthest, *((c.lp - old).exp() - 1).abs().tolist()])
                    loss = loss + policy_losses(algorithm, c.lp, old, was.advantage, 0.2, 0.2).sum() / tokens
                    if critic:
                        losses = value_losses(c.value, was.value.detach(), was.returns, CLIP)
                        (slopes,) = torch.autograd.grad(losses.sum(), c.value, retain_graph=True)
                        clipped += (slopes == 0).tolist()
                        lost += losses.tolist()
                        loss = loss + losses.sum() / tokens
                optimizer.zero_grad(set_to_none=False)  # where all tokens are clipped, momentum goes on
                loss.backward()
                optimizer.step()
        if critic:
            values = [value for was in first for value in was.value.tolist()]
            returns = [value for was in first for value in was.returns]
            errors = [target - value for target, value in zip(returns, values, strict=True)]
            explained = 1 - pvariance(errors) / pvariance(returns)
            metrics.append({"value_loss": fmean(lost), "value_clip_ratio": fmean(clipped), "value_mean": fmean(values),
                            "return_mean": fmean(returns), "value_explained_variance": explained})  # fmt: skip
    return metrics, farthest


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("of", ["grpo", "critic", "value head"])
def test_mini_batches_equal_plain_loop(model_path: Path, of: str, recompute: bool) -> None:
    batches = [make_batch(seed=71, groups=3, size=2, longest=6), make_batch(seed=72, groups=2, size=3, longest=6)]
    values: dict[str, Any] = {"algorithm": "grpo" if of == "grpo" else "ppo", "max_mean_ratio": 0, **PASSES}
    if recompute:
        values |= {"old_log_probs": "recompute", "correction": "none"}
    if of != "grpo":
        values["critic"] = {"learning_rate": 1e-2, "value_clip": CLIP}
    if of == "value head":
        values["critic"] |= {"form": "head", "value_coefficient": 1.0}
    learner = make_learner(model_path, **values)
    model, critic, ours = load(model_path), None, None
    if of == "critic":
        ours = learner._critic._model.unwrap()
        critic = make_learner(model_path, **values)._critic._model.unwrap()
    elif of == "value head":
        ours = learner._plugin.value_head
        critic = SharedTrunk(model, ours)
    expected, farthest = plain_steps(model, critic, batches, values["algorithm"], recompute)
    metrics = [learner.train_step(groups) for groups in batches]
    assert learner.step == len(batches)

    near = {"rtol": 1e-5, "atol": 1e-6}
    assert_near(*(dict(one.named_parameters()) for one in (learner._causal_lm, model)), **near)
    if recompute:
        assert farthest > 1e-3  # a second pass is not on policy any more: the old log-probs stayed
    if critic is not None:
        theirs = critic if of == "critic" else critic.head
        assert_near(*(dict(one.named_parameters()) for one in (ours, theirs)), **near)
        for found, one in zip(metrics, expected, strict=True):
            assert {name: found[name] for name in one} == pytest.approx(one, rel=1e-5, abs=1e-6)
        assert max(one["value_clip_ratio"] for one in expected) > 0
