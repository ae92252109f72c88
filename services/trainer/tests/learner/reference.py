"""Every formula of the losses written a second time, as its paper has it and sharing no code with the trainer.

First in Python floats, for one token or one completion at a time, losses with their derivative by the token's log-prob;
then, from these, the loss of a batch of groups. There is no other copy in the tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from quartet.v1 import experience_pb2
from torch import Tensor
from transformers import Qwen2ForCausalLM

from quartet_common.tensors import decode, decode_ragged

Slope = tuple[float, float]
"""A number, and its derivative by the log-prob (or the value) of the token."""


def held(difference: float) -> Slope:
    """A ratio's exponent as it is taken: within +-20, as the documentation says."""
    return (difference, 1.0) if abs(difference) <= 20 else (math.copysign(20.0, difference), 0.0)


def surrogate(difference: float, advantage: float, low: float, high: float, dual: float = 0.0) -> Slope:
    """-min(r A, clip(r, 1 - low, 1 + high) A), at most -dual A where A < 0."""
    exponent, slope = held(difference)
    ratio = math.exp(exponent)
    clipped = min(max(ratio, 1 - low), 1 + high)
    if dual and advantage < 0 and ratio > dual:
        return -dual * advantage, 0.0
    if ratio * advantage <= clipped * advantage:  # inside the bounds both are the same
        return -ratio * advantage, -ratio * advantage * slope
    return -clipped * advantage, 0.0


def cispo(difference: float, advantage: float, log_prob: float, high: float, low: float | None = None) -> Slope:
    """-sg(min(r, 1 + high)) A log p; with `low` the ratio is at least 1 - low."""
    weight = min(max(math.exp(held(difference)[0]), 0.0 if low is None else 1 - low), 1 + high)
    return -weight * advantage * log_prob, -weight * advantage


def dppo(log_prob: float, old: float, advantage: float, divergence: str, low: float, high: float) -> Slope:
    """-M r A; M is 0 where the token's two-way divergence is above its bound and the update would raise it."""
    exponent, slope = held(log_prob - old)
    p, q = math.exp(old), math.exp(log_prob)
    if divergence == "tv":
        apart = abs(p - q)
    else:
        apart = p * math.log(p / q) + (1 - p) * (math.log(max(1 - p, 1e-8)) - math.log(max(1 - q, 1e-8)))
    if apart > (high if advantage > 0 else low) and (advantage > 0) == (q > p):
        return 0.0, 0.0
    return -math.exp(exponent) * advantage, -math.exp(exponent) * advantage * slope


KLS: dict[str, Callable[[float], Slope]] = {
    # Of d = log p - log p_other.
    "k1": lambda d: held(d),
    "k2": lambda d: (held(d)[0] ** 2 / 2, held(d)[0] * held(d)[1]),
    "k3": lambda d: (math.exp(-held(d)[0]) + held(d)[0] - 1, (1 - math.exp(-held(d)[0])) * held(d)[1]),
}


def value_loss(value: float, old: float, target: float, clip: float) -> Slope:
    """max((V - R)^2, (V_clip - R)^2) / 2; derivative by V."""
    bounded = min(max(value, old - clip), old + clip) if clip else value
    if (value - target) ** 2 >= (bounded - target) ** 2:
        return (value - target) ** 2 / 2, value - target
    return (bounded - target) ** 2 / 2, 0.0


def normalized(rewards: Sequence[float], epsilon: float = 1e-4) -> list[float]:
    std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return [r / (std + epsilon) for r in centered(rewards)]


def centered(rewards: Sequence[float]) -> list[float]:
    return [r - statistics.fmean(rewards) for r in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    return [r - (sum(rewards) - r) / max(1, len(rewards) - 1) for r in rewards] if len(rewards) > 1 else [0.0]


def relative_to_mean(rewards: Sequence[float]) -> list[float]:
    mean = statistics.fmean(rewards)
    return [r / mean - 1 if mean > 0 else 0.0 for r in rewards]


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """The sum that the recursion comes to."""
    after = [*values, 0.0]
    deltas = [r + gamma * after[t + 1] - after[t] for t, r in enumerate(rewards)]
    return [sum(delta * (gamma * lam) ** k for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))]


def whitened(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [0.0 for _ in values]
    return [v / math.sqrt(statistics.variance(values) + 1e-8) for v in centered(values)]


def token_weight(aggregation: str, tokens: int, lengths: Sequence[int], longest: int) -> float:
    """Of each token of a completion of so many, among completions of these lengths."""
    counted = sum(length > 0 for length in lengths)
    return {
        "token-mean": 1 / max(1, sum(lengths)),
        "sequence-mean-token-mean": 1 / max(1, counted * tokens),
        "sequence-mean-token-sum": 1 / max(1, counted),
        "constant": 1 / (len(lengths) * longest),
    }[aggregation]


# --- Of a batch -------------------------------------------------------------------------------------------------------


@dataclass
class Completion:
    """One completion's trained tokens."""

    group: int
    reward: float
    lp: Tensor
    """[n], with gradient."""
    entropy: Tensor
    """[n], with gradient."""
    rollout: Tensor
    ref: Tensor
    teacher: Tensor
    value: Tensor
    """[n], with gradient if there is a critic."""
    advantage: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)

    def old(self, recompute: bool) -> Tensor:
        return self.lp.detach() if recompute else self.rollout


def load(path: Path, dtype: torch.dtype = torch.float64) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """A learner's model attends as its family does, rows apart, in place of how the learner has it."""
    before, model.config._attn_implementation = model.config._attn_implementation, "sdpa"
    yield
    model.config._attn_implementation = before


class SharedTrunk(torch.nn.Module):
    """A value head's critic: its trunk is the policy's."""

    def __init__(self, model: Qwen2ForCausalLM, head: torch.nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = model.model, torch.nn.Linear(32, 1).double()
        self.head.load_state_dict(head.state_dict())


def log_probs_of(model: Any, ids: Tensor, tokens: Tensor, prompt: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs [n] of the n tokens that end `ids` [1, prompt + n], and the entropies [n] that they are drawn with."""
    log_probs = torch.log_softmax(model(input_ids=ids).logits[0, prompt - 1 : -1] / temperature, dim=-1)
    return log_probs.gather(-1, tokens[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)


def read(
    groups: Sequence[experience_pb2.GroupTensors], model: Any, reference: Any, critic: Any, mask_truncated: bool = False
) -> list[Completion]:
    """One forward pass a completion; nothing is padded."""
    found = []
    for number, group in enumerate(groups):
        prompt, rewards, truncated = (decode(t) for t in (group.prompt_token_ids, group.rewards, group.truncated))
        masks = decode_ragged(group.loss_mask) if group.HasField("loss_mask") else None
        log_probs, temperatures = decode_ragged(group.rollout_log_probs), decode(group.temperatures)
        judged = decode_ragged(group.teacher_log_probs) if group.HasField("teacher_log_probs") else None
        for index, tokens in enumerate(decode_ragged(group.completion_token_ids)):
            kept = torch.ones(len(tokens)).bool() if masks is None else torch.tensor(masks[index].copy()).bool()
            if mask_truncated and truncated[index]:
                kept = torch.zeros_like(kept)
            ids, chosen = torch.tensor([*prompt.tolist(), *tokens.tolist()])[None], torch.tensor(tokens.copy()).long()

            at = ids, chosen, len(prompt), float(temperatures[index])
            lp, entropy = log_probs_of(model, *at)
            with torch.no_grad():
                ref = lp.detach() if reference is None else log_probs_of(reference, *at)[0]
            value = torch.zeros_like(lp)
            if critic is not None:
                with own_attention(critic.trunk):
                    hidden = critic.trunk(input_ids=ids).last_hidden_state[0, len(prompt) - 1 : -1]
                value = hidden @ critic.head.weight[0] + critic.head.bias
            rollout = torch.tensor(log_probs[index].copy()).to(lp)
            teacher = ref if judged is None else torch.tensor(judged[index].copy()).to(lp)
            of_tokens = (each[kept] for each in (lp, entropy, rollout, ref, teacher, value))
            found.append(Completion(number, float(rewards[index]), *of_tokens))
    return found


OF_GROUP: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "dr_grpo": centered, "rloo": leave_one_out, "rloo_sequence": leave_one_out, "max_rl": relative_to_mean,
}  # fmt: skip


def estimate(completions: list[Completion], algorithm: str, beta: float, kl: str, recompute: bool) -> None:
    """Fill in advantages and returns; `beta` is that of a KL in the reward."""

    def penalties(c: Completion) -> list[float]:
        return [beta * KLS[kl](d)[0] for d in (c.old(recompute) - c.ref).tolist()]

    for c in completions:
        peers = [p for p in completions if p.group == c.group]
        own = next(index for index, p in enumerate(peers) if p is c)
        gained = [-p for p in penalties(c)]
        if algorithm == "reinforce_pp_baseline":
            c.advantage = [centered([p.reward for p in peers])[own] + g for g in gained]
        elif algorithm in ("reinforce_pp", "ppo"):
            ppo = algorithm == "ppo"
            if gained:
                gained[-1] += max(-5.0, min(5.0, c.reward)) if ppo else c.reward
            values = c.value.tolist() if ppo else [0.0] * len(gained)
            c.advantage = gae(gained, values, 1.0, 0.95 if ppo else 1.0)
            c.returns = [a + v for a, v in zip(c.advantage, values, strict=True)]
        else:
            of_group = OF_GROUP.get(algorithm, normalized)
            c.advantage = [of_group([p.reward - sum(penalties(p)) for p in peers])[own]] * len(c.lp)
    if algorithm in ("reinforce_pp", "reinforce_pp_baseline", "ppo"):
        every = iter(whitened([a for c in completions for a in c.advantage]))
        for c in completions:
            c.advantage = [next(every) for _ in c.advantage]


def with_slope(found: Sequence[Slope], by: Tensor) -> Tensor:
    """The numbers [n], with their derivatives by [n]."""
    numbers = torch.tensor(found, dtype=torch.float64).reshape(-1, 2)
    return numbers[:, 0] + numbers[:, 1] * (by - by.detach())


def policy_losses(
    algorithm: str, lp: Tensor, old: Tensor, advantages: Sequence[float], low: float, high: float, dual: float = 0.0
) -> Tensor:
    """[n], of a completion's tokens, with gradient."""
    differences, log_probs = (lp.detach() - old).tolist(), lp.tolist()
    if algorithm == "cispo":
        return with_slope([cispo(*at, high) for at in zip(differences, advantages, log_probs, strict=True)], lp)
    if algorithm == "dppo":
        each = zip(log_probs, old.tolist(), advantages, strict=True)
        return with_slope([dppo(*at, "tv", 0.15, 0.15) for at in each], lp)
    if algorithm == "rloo_sequence" and differences:  # one loss; each token adds the slope of its own log-prob
        value, slope = surrogate(held(sum(differences))[0], advantages[0], low, high, dual)
        return with_slope([(value / len(differences), slope)] * len(differences), lp)
    if algorithm == "gspo" and differences:  # of the mean; its gradient is the mean of its tokens'
        differences = [statistics.fmean(differences)] * len(differences)
    return with_slope([surrogate(d, a, low, high, dual) for d, a in zip(differences, advantages, strict=True)], lp)


def value_losses(values: Tensor, old: Tensor, returns: Sequence[float], clip: float) -> Tensor:
    """[n], with gradient."""
    at = zip(values.tolist(), old.tolist(), returns, strict=True)
    return with_slope([value_loss(*one, clip) for one in at], values)


DEFAULTS: dict[str, Any] = {
    "algorithm": "grpo", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "kl_coefficient": 0.0,
    "kl_estimator": "k3", "kl_in": "loss", "entropy_coefficient": 0.0, "old_log_probs": "rollout", "correction": "tis",
    "tis_cap": 2.0, "mask_truncated": False, "aggregation": "token-mean", "distillation": {},
}  # fmt: skip
OF_ALGORITHM: dict[str, dict[str, Any]] = {
    "dapo": {"clip_high": 0.28, "mask_truncated": True},
    "dr_grpo": {"aggregation": "constant"},
    "rloo": {"aggregation": "sequence-mean-token-sum"},
    "reinforce_pp": {"kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp_baseline": {"kl_estimator": "k2"},
    "gspo": {
        "clip_low": 3e-4, "clip_high": 4e-4, "old_log_probs": "recompute", "aggregation": "sequence-mean-token-mean",
    },
    "cispo": {"clip_high": 4.0},
    "rloo_sequence": {"aggregation": "sequence-mean-token-sum", "old_log_probs": "recompute"},
    "dppo": {},
    "max_rl": {},
    "ppo": {"kl_in": "reward", "kl_estimator": "k1"},
}  # fmt: skip


def corrections(w: Tensor, at: Mapping[str, Any]) -> Tensor:
    """Factors [n] for the tokens of a completion, of w [n], the old policy's probabilities over the rollout's."""
    if at["correction"] == "icepop":
        return w * ((w >= 0.5) & (w <= 5))
    if at["correction"] == "sequence-mask" and len(w):
        weight = w.log().mean().exp() if at.get("sequence_mask_mean") == "geometric" else w.log().sum().exp()
        return torch.full_like(w, weight if weight <= at["sequence_mask_cap"] else 0.0)
    return w.clamp(max=at["tis_cap"]) if at["correction"] == "tis" and at["tis_cap"] else torch.ones_like(w)


def batch_loss(
    model: Qwen2ForCausalLM,
    groups: Sequence[experience_pb2.GroupTensors],
    values: Mapping[str, Any] | None = None,
    *,
    reference: Qwen2ForCausalLM | None = None,
    critic: Any = None,
    longest: int = 16,
) -> tuple[Tensor, Tensor]:
    """The policy's loss and the critic's before the first step on a batch, `values` being the run file's keys."""
    at = {**DEFAULTS, **OF_ALGORITHM.get((values or {}).get("algorithm", "grpo"), {}), **(values or {})}
    algorithm, beta, kl, recompute = (at[k] for k in ("algorithm", "kl_coefficient", "kl_estimator", "old_log_probs"))
    recompute = recompute == "recompute"
    completions = read(groups, model, reference, critic, at["mask_truncated"])
    estimate(completions, algorithm, beta if at["kl_in"] == "reward" else 0.0, kl, recompute)
    if share := at["distillation"]:
        for c in completions:
            over = (c.teacher - c.old(recompute)).tolist()
            own = [share.get("reward_weight", 0.0) * a for a in c.advantage]
            c.advantage = [a + share["coefficient"] * d for a, d in zip(own, over, strict=True)]
    lengths = [len(c.lp) for c in completions]
    total, of_critic = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for c in completions:
        old = c.old(recompute)
        losses = policy_losses(algorithm, c.lp, old, c.advantage, at["clip_low"], at["clip_high"], at["dual_clip"])
        if recompute:
            losses = corrections(torch.exp(old - c.rollout), at) * losses
        if beta and at["kl_in"] == "loss":
            losses = losses + beta * with_slope([KLS[kl](d) for d in (c.lp.detach() - c.ref).tolist()], c.lp)
        losses = losses - at["entropy_coefficient"] * c.entropy
        total = total + token_weight(at["aggregation"], len(c.lp), lengths, longest) * losses.sum()
        if critic is not None:  # the values are those before the step, so that the clip does nothing yet
            of_critic = of_critic + value_losses(c.value, c.value.detach(), c.returns, 0.0).sum() / max(1, sum(lengths))
    return total, of_critic
