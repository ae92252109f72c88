"""The metrics of a step: their names and how they are computed; docs/metrics.md says what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quartet_trainer.algorithms.advantages import group_std
from quartet_trainer.batch.decode import ExperienceBatch
from quartet_trainer.batch.planner import StepPlan

TOKENS, UPDATES, SUM, PEAK = "mean over tokens", "mean over updates", "sum", "peak"
"""How values of micro-batches and ranks are combined: their sum over the computed tokens; their sum over the batch's
updates, if it is a mean within each update; their sum; their maximum over the ranks."""


@dataclass(frozen=True)
class Metric:
    """A metric of the learner: declared here, explained in docs/metrics.md."""

    public: str
    """Its name in metrics.jsonl."""
    aggregation: str = ""
    """Empty: it is the same on every rank already."""
    only_with: str = ""
    """What the learner must have to report it."""


METRICS: dict[str, Metric] = {
    "loss": Metric("train/loss", UPDATES),
    "policy_loss": Metric("train/policy_loss", UPDATES),
    "kl": Metric("train/kl", TOKENS, only_with="reference model"),
    "kl_coefficient": Metric("train/kl_coefficient", only_with="KL target"),
    "teacher_kl": Metric("train/teacher_kl", only_with="distillation"),
    "entropy": Metric("train/entropy", TOKENS),
    "entropy_coefficient": Metric("train/entropy_coefficient", only_with="entropy target"),
    "approx_kl": Metric("train/approx_kl", TOKENS),
    "clip_ratio_low": Metric("train/clip_ratio_low", TOKENS),
    "clip_ratio_high": Metric("train/clip_ratio_high", TOKENS),
    "ratio_mean": Metric("train/ratio_mean", TOKENS),
    "grad_norm": Metric("train/grad_norm"),
    "update_skipped": Metric("train/update_skipped"),
    "learning_rate": Metric("train/learning_rate"),
    "reward_mean": Metric("reward/mean"),
    "reward_std": Metric("reward/std"),
    "frac_reward_zero_std": Metric("reward/frac_zero_std"),
    "solve_none": Metric("reward/solve_none"),
    "solve_all": Metric("reward/solve_all"),
    "format_acc": Metric("reward/format_acc"),
    "ans_acc": Metric("reward/ans_acc"),
    "advantage_abs_mean": Metric("train/advantage_abs_mean"),
    "completion_length_mean": Metric("completions/mean_length"),
    "completion_length_max": Metric("completions/max_length"),
    "truncated_ratio": Metric("completions/truncated_ratio"),
    "log_prob_diff_mean": Metric("mismatch/log_prob_diff_mean", TOKENS),
    "log_prob_diff_max": Metric("mismatch/log_prob_diff_max", PEAK),
    "mismatch_kl": Metric("mismatch/kl", TOKENS),
    "effective_sample_size": Metric("mismatch/effective_sample_size"),
    "tis_weight_mean": Metric("mismatch/tis_weight_mean", TOKENS),
    "dropped_ratio": Metric("train/dropped_ratio", TOKENS),
    "router_load_max": Metric("train/router_load_max", only_with="experts"),
    "router_idle_experts": Metric("train/router_idle_experts", only_with="experts"),
    "router_entropy": Metric("train/router_entropy", only_with="experts"),
    "router_disagreement": Metric("train/router_disagreement", only_with="router replay"),
    "groups": Metric("batch/groups"),
    "completions": Metric("batch/completions"),
    "completions_skipped": Metric("batch/completions_skipped"),
    "rows": Metric("batch/rows"),
    "completion_tokens": Metric("batch/completion_tokens"),
    "trained_tokens": Metric("batch/trained_tokens"),
    "computed_tokens": Metric("batch/computed_tokens", SUM),
    "forward_tokens": Metric("batch/forward_tokens", SUM),
    "shared_prompt_tokens": Metric("batch/shared_prompt_tokens", SUM),
    "padding_ratio": Metric("batch/padding_ratio"),
    "micro_batches": Metric("batch/micro_batches", SUM),
    "forward_seconds": Metric("time/forward", PEAK),
    "backward_seconds": Metric("time/backward", PEAK),
    "optimizer_seconds": Metric("time/optimizer", PEAK),
    "train_step_seconds": Metric("time/train_step", PEAK),
    # With a value head no completion is skipped: the computed tokens are the trained ones, of all updates.
    "value_loss": Metric("train/value_loss", TOKENS, only_with="critic"),
    "value_clip_ratio": Metric("train/value_clip_ratio", TOKENS, only_with="critic"),
    "value_mean": Metric("train/value_mean", only_with="critic"),
    "return_mean": Metric("train/return_mean", only_with="critic"),
    "value_explained_variance": Metric("train/value_explained_variance", only_with="critic"),
    "critic_grad_norm": Metric("train/critic_grad_norm", only_with="separate critic"),
    "critic_seconds": Metric("train/critic_seconds", only_with="separate critic"),
    "ptx_loss": Metric("train/ptx_loss", UPDATES, only_with="ptx"),
}

SUMS = (
    *(name for name, metric in METRICS.items() if metric.aggregation in (TOKENS, UPDATES, SUM)),
    *("importance", "importance_squared", "real_tokens"),  # other metrics are computed from these
)
PEAKS = tuple(name for name, metric in METRICS.items() if metric.aggregation == PEAK)
MEANS_OF_UPDATES = [
    place for place, name in enumerate(SUMS) if name in METRICS and METRICS[name].aggregation == UPDATES
]
"""Indices into `SUMS`."""


def public_names(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the learner's metrics under their names in metrics.jsonl."""
    return {METRICS[name].public: value for name, value in metrics.items()}


def batch_metrics(batch: ExperienceBatch, plan: StepPlan) -> dict[str, float]:
    """The metrics of the batch itself, the same on every rank."""
    groups = int(batch.groups.max()) + 1
    stds = group_std(batch.rewards, batch.compared)
    completions = batch.groups.numel()
    lengths = torch.bincount(batch.completion_of_token, minlength=completions).double()
    computed = torch.zeros(completions, dtype=torch.bool).index_fill_(0, batch.completions[plan.needed], True)
    trained = plan.mask.sum().clamp(min=1)
    return {
        "reward_mean": batch.rewards.double().mean().item(),
        "reward_std": stds.mean().item(),
        "frac_reward_zero_std": (stds == 0).double().mean().item(),
        "format_acc": batch.format_acc.double().mean().item(),
        **_accuracy(batch),
        "advantage_abs_mean": (plan.advantages.abs()[plan.mask].sum() / trained).item(),
        "completion_length_mean": lengths.mean().item(),
        "completion_length_max": lengths.max().item(),
        "truncated_ratio": batch.truncated.double().mean().item(),
        "groups": float(groups),
        "completions": float(completions),
        "completions_skipped": float((~computed).sum()),
        "rows": float(batch.completions.numel()),
        "completion_tokens": float(batch.rows.numel()),
        "trained_tokens": float(plan.mask.sum()),
    }


def _accuracy(batch: ExperienceBatch) -> dict[str, float]:
    """The metrics of the batch's judged answers; empty if none was judged."""
    right = batch.ans_acc[batch.ans_judged]
    groups, group_of = batch.compared[batch.ans_judged].unique(return_inverse=True)
    if not right.numel():
        return {}
    least = torch.ones(groups.numel()).scatter_reduce_(0, group_of, right, "amin")
    most = torch.zeros(groups.numel()).scatter_reduce_(0, group_of, right, "amax")
    return {
        "solve_none": (most <= 0).double().mean().item(),
        "solve_all": (least >= 1).double().mean().item(),
        "ans_acc": right.double().mean().item(),
    }


def target_metrics(mask: Tensor, old_values: Tensor, returns: Tensor) -> dict[str, float]:
    """The metrics of the critic's targets, the same on every rank; all [T], `mask` is true for trained tokens."""
    returns, old = returns[mask], old_values[mask]
    spread = returns.var(correction=0).item() if returns.numel() else 0.0
    unexplained = (returns - old).var(correction=0).item() if returns.numel() else 0.0
    rounding = 1e-20 * returns.square().mean().item() if returns.numel() else 0.0
    return {
        "value_mean": old.sum().item() / max(1, old.numel()),
        "return_mean": returns.sum().item() / max(1, returns.numel()),
        "value_explained_variance": 1 - unexplained / spread if spread > rounding else 0.0,
    }


def computed_metrics(sums: Tensor, peaks: Tensor, *, kl_in_loss: bool, ptx: bool, value_head: bool) -> dict[str, float]:
    """Metrics from the sums and peaks over all ranks, float64 in the order of `SUMS` and `PEAKS`."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens = max(total["computed_tokens"], 1.0)
    reported = {"kl": kl_in_loss, "ptx_loss": ptx, "value_loss": value_head, "value_clip_ratio": value_head}
    found = {
        name: total[name] / (tokens if metric.aggregation == TOKENS else 1.0)
        for name, metric in METRICS.items()
        if name in total and reported.get(name, True)
    }
    importance, squared = total["importance"], total["importance_squared"]
    return {
        **found,
        "effective_sample_size": importance**2 / (tokens * squared) if squared else 1.0,
        "padding_ratio": 1 - total["real_tokens"] / total["forward_tokens"] if total["forward_tokens"] else 0.0,
        **dict(zip(PEAKS, peaks.tolist(), strict=True)),
    }
