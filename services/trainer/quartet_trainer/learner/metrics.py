"""The metrics of a step: their names, their meanings, and how they are made.

"Trained tokens" are those that count in the loss; "computed tokens" are those of them that went through the model:
all, or with `skip_zero_advantage` those of completions that can move the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.algorithms.advantages import group_std
from quartet_trainer.batch.decode import ExperienceBatch
from quartet_trainer.batch.planner import StepPlan

METRICS: dict[str, str] = {
    "loss": "The policy's loss: policy_loss, and KL and entropy as far as they are in it; PTX apart.",
    "policy_loss": "Its policy part, aggregated.",
    "kl": "Mean KL to the reference model by `kl_estimator`, over computed tokens, or of the old policy over trained "
    "tokens where it is taken from the reward; only if there is a reference model.",
    "entropy": "Mean entropy of the policy at computed tokens, in nats, at the sampling temperature.",
    "approx_kl": "Mean k3 KL of the policy and the old policy over computed tokens.",
    "clip_ratio_low": "Share of computed tokens whose gradient the lower clip bound took away.",
    "clip_ratio_high": "Share of computed tokens whose gradient the upper clip bound took away.",
    "ratio_mean": "Mean importance ratio over computed tokens.",
    "grad_norm": "Norm of the gradient before it was scaled down to max_grad_norm; the mean over the batch's updates.",
    "update_skipped": "Share of the batch's updates that left the weights as they were: infinite gradient, high ratio.",
    "learning_rate": "Learning rate of this step.",
    "reward_mean": "Mean reward over completions.",
    "reward_std": "Mean over groups of the unbiased standard deviation of their rewards.",
    "frac_reward_zero_std": "Share of groups whose rewards are all equal: nothing to learn from.",
    "solve_none": "Share of groups without any right answer, of those with judged answers; only if there are any. "
    "So are solve_all and ans_acc.",
    "solve_all": "Share of groups with right answers only, of those with judged answers.",
    "format_acc": "Mean format accuracy over completions.",
    "ans_acc": "Mean answer accuracy over the completions whose answers were judged.",
    "advantage_abs_mean": "Mean absolute advantage over trained tokens.",
    "completion_length_mean": "Mean tokens of a completion.",
    "completion_length_max": "Tokens of the longest completion.",
    "truncated_ratio": "Share of completions that ended at their length limit.",
    "log_prob_diff_mean": "Mean |trainer's - rollout's log-prob| over computed tokens, before the step.",
    "log_prob_diff_max": "Greatest |trainer's - rollout's log-prob| over computed tokens.",
    "mismatch_kl": "Mean k3 KL of the rollout's policy and the trainer's over computed tokens.",
    "effective_sample_size": "(sum w)^2 / (n sum w^2) with w = e^(trainer's - rollout's log-prob), computed tokens.",
    "tis_weight_mean": "Mean weight of the correction over computed tokens; 1 where there is none.",
    "dropped_ratio": "Share of computed tokens that the correction dropped.",
    "router_load_max": "Tokens of the busiest expert over the mean of all, in passes with gradient, mean over layers; "
    "1: all alike. Of a mixture of experts, not with hybrid_parallel; so are the next two.",
    "router_idle_experts": "Share of experts that no token of the step went to.",
    "router_entropy": "Mean entropy of the router's distribution over its greatest possible, 0 to 1.",
    "groups": "Groups in the batch.",
    "completions": "Completions in the batch.",
    "completions_skipped": "Completions that needed no forward pass.",
    "completion_tokens": "Tokens of all completions.",
    "trained_tokens": "Completion tokens that count in the loss.",
    "computed_tokens": "Completion tokens whose log-probs were computed.",
    "forward_tokens": "Tokens through the model on all ranks: prompts, completions and padding.",
    "shared_prompt_tokens": "Prompt tokens that were not computed again for the other completions of their group.",
    "padding_ratio": "Share of padding in forward_tokens.",
    "micro_batches": "Forward passes with gradient, over all ranks.",
    "forward_seconds": "Time of forward passes and losses, the reference model's included; the slowest rank's.",
    "backward_seconds": "Time of backward passes, the exchange of gradients included; the slowest rank's.",
    "optimizer_seconds": "Time of gradient clipping and AdamW; the slowest rank's.",
    "train_step_seconds": "Time of the whole step, decoding included; the slowest rank's.",
    "value_loss": "The critic's loss: mean over trained tokens, without its coefficient. This and the next six: with a "
    "critic only.",
    "value_clip_ratio": "Share of trained tokens whose critic's gradient the value clip took away.",
    "value_mean": "Mean of the critic's values over trained tokens, before the step.",
    "return_mean": "Mean return over trained tokens: advantage + value, before the whitening.",
    "value_explained_variance": "1 - variance of (return - value) / variance of return, over trained tokens; 0 where "
    "returns are equal up to rounding.",
    "critic_grad_norm": "Norm of the critic's gradient before it was scaled down to max_grad_norm; no head's.",
    "critic_seconds": "Time of the critic's passes with gradient and its update; the slowest rank's; no head's.",
    "ptx_loss": "Language-model loss of ptx.data, mean over its tokens in the step; with ptx.coefficient > 0 only.",
}

CRITIC = (
    "value_loss",
    "value_clip_ratio",
    "value_mean",
    "return_mean",
    "value_explained_variance",
    "critic_grad_norm",
    "critic_seconds",
)
"""Those that only a learner with a critic has; of a value head, the last two are the policy's own."""

ROUTER = ("router_load_max", "router_idle_experts", "router_entropy")
"""Those that only a mixture of experts has."""

SUMS = (
    "loss",
    "policy_loss",
    "kl",
    "entropy",
    "approx_kl",
    "clip_ratio_low",
    "clip_ratio_high",
    "ratio_mean",
    "log_prob_diff_mean",
    "mismatch_kl",
    "tis_weight_mean",
    "dropped_ratio",
    "importance",
    "importance_squared",
    "computed_tokens",
    "forward_tokens",
    "real_tokens",
    "shared_prompt_tokens",
    "micro_batches",
    "ptx_loss",
    "value_loss",
    "value_clip_ratio",
)
"""Added up over micro-batches and ranks."""

MEANS_OF_UPDATES = [SUMS.index(name) for name in ("loss", "policy_loss", "ptx_loss", "value_loss")]
"""Places in `SUMS` of what is a mean over its batch already: of several optimizer steps their mean counts."""

PEAKS = ("log_prob_diff_max", "forward_seconds", "backward_seconds", "optimizer_seconds", "train_step_seconds")
"""Of which the greatest over the ranks counts."""

_TOKEN_MEANS = (
    "kl",
    "entropy",
    "approx_kl",
    "clip_ratio_low",
    "clip_ratio_high",
    "ratio_mean",
    "log_prob_diff_mean",
    "mismatch_kl",
    "tis_weight_mean",
    "dropped_ratio",
)


def batch_metrics(batch: ExperienceBatch, plan: StepPlan) -> dict[str, float]:
    """What the batch itself says, alike on every rank."""
    groups = int(batch.groups.max()) + 1
    stds = group_std(batch.rewards, batch.groups)
    trained = plan.mask.sum().clamp(min=1)
    return {
        "reward_mean": batch.rewards.double().mean().item(),
        "reward_std": stds.mean().item(),
        "frac_reward_zero_std": (stds == 0).double().mean().item(),
        "format_acc": batch.format_acc.double().mean().item(),
        **_accuracy(batch),
        "advantage_abs_mean": (plan.advantages.abs()[plan.mask].sum() / trained).item(),
        "completion_length_mean": batch.completion_lengths.double().mean().item(),
        "completion_length_max": float(batch.completion_lengths.max()),
        "truncated_ratio": batch.truncated.double().mean().item(),
        "groups": float(groups),
        "completions": float(batch.completions),
        "completions_skipped": float((~plan.needed).sum()),
        "completion_tokens": float(batch.rows.numel()),
        "trained_tokens": float(plan.mask.sum()),
    }


def _accuracy(batch: ExperienceBatch) -> dict[str, float]:
    """What the judged answers of the batch say; nothing if none was judged."""
    right = batch.ans_acc[batch.ans_judged]
    groups, group_of = batch.groups[batch.ans_judged].unique(return_inverse=True)
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
    """What the critic's targets say, alike on every rank; all [T], of which `mask` tells the trained tokens."""
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
    """From sums and peaks over all ranks (float64, in the order of `SUMS` and `PEAKS`) to the metrics."""
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    tokens = max(total["computed_tokens"], 1.0)
    metrics = {name: total[name] / tokens for name in _TOKEN_MEANS if name != "kl" or kl_in_loss}
    importance_squared = total["importance_squared"]
    return {
        "loss": total["loss"],
        "policy_loss": total["policy_loss"],
        **metrics,
        **({"ptx_loss": total["ptx_loss"]} if ptx else {}),
        # With a value head no completion is skipped: the computed tokens are the trained ones, of all updates.
        **(
            {"value_loss": total["value_loss"], "value_clip_ratio": total["value_clip_ratio"] / tokens}
            if value_head
            else {}
        ),
        "effective_sample_size": total["importance"] ** 2 / (tokens * importance_squared)
        if importance_squared
        else 1.0,
        "computed_tokens": total["computed_tokens"],
        "forward_tokens": total["forward_tokens"],
        "shared_prompt_tokens": total["shared_prompt_tokens"],
        "padding_ratio": 1 - total["real_tokens"] / max(total["forward_tokens"], 1.0),
        "micro_batches": total["micro_batches"],
        **dict(zip(PEAKS, peaks.tolist(), strict=True)),
    }
