"""Every algorithm's loss in plain PyTorch, one completion and one token at a time, sharing no code with the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from plain_loop import completion_log_probs
from quartet.v1 import experience_pb2
from torch import Tensor
from transformers import Qwen2ForCausalLM

from quartet_common.tensors import decode, decode_ragged


@dataclass
class Completion:
    """One completion's trained tokens."""

    group: int
    reward: float
    lp: Tensor  # [n], with gradient
    rollout: Tensor
    ref: Tensor
    value: Tensor  # with gradient, if there is a critic
    advantage: list[float]
    returns: list[float]


def read(groups: Sequence[experience_pb2.GroupTensors], model, reference, critic) -> list[Completion]:
    found = []
    for number, group in enumerate(groups):
        prompt, rewards = decode(group.prompt_token_ids), decode(group.rewards)
        masks = decode_ragged(group.loss_mask) if group.HasField("loss_mask") else None
        log_probs = decode_ragged(group.rollout_log_probs)
        for index, tokens in enumerate(decode_ragged(group.completion_token_ids)):
            kept = torch.ones(len(tokens)).bool() if masks is None else torch.tensor(masks[index].copy()).bool()
            temperature = float(decode(group.temperatures)[index])
            lp = completion_log_probs(model, prompt, tokens, temperature)
            with torch.no_grad():
                ref = completion_log_probs(reference, prompt, tokens, temperature)
            value = torch.zeros_like(lp)
            if critic is not None:
                ids = torch.tensor([*prompt.tolist(), *tokens.tolist()])[None]
                hidden = critic.trunk(input_ids=ids).last_hidden_state[0]
                value = (hidden @ critic.head.weight[0] + critic.head.bias)[len(prompt) - 1 : -1]
            rollout = torch.tensor(log_probs[index].copy()).to(lp)
            found.append(
                Completion(number, float(rewards[index]), lp[kept], rollout[kept], ref[kept], value[kept], [], [])
            )
    return found


def kl_of(estimator: str, lp: Tensor, ref: Tensor) -> Tensor:
    return {"k1": lp - ref, "k2": (lp - ref) ** 2 / 2, "k3": torch.exp(ref - lp) - (ref - lp) - 1}[estimator]


def estimate(completions: list[Completion], algorithm: str, beta: float, estimator: str, recompute: bool) -> None:
    """Fill in advantages (and returns); `beta` is that of a KL in the reward."""
    for c in completions:
        old = c.lp.detach() if recompute else c.rollout
        penalty = [beta * float(k) for k in kl_of(estimator, old, c.ref)]
        peers = [p for p in completions if p.group == c.group]
        rewards = torch.tensor([p.reward for p in peers], dtype=torch.float64)
        if algorithm in ("reinforce_pp", "ppo"):
            reward = max(-5.0, min(5.0, c.reward)) if algorithm == "ppo" else c.reward
            gained = [-p for p in penalty]
            if gained:
                gained[-1] += reward
            if algorithm == "reinforce_pp":
                c.advantage = [sum(gained[t:]) for t in range(len(gained))]
                continue
            values = [*c.value.tolist(), 0.0]
            for t in range(len(gained)):  # the sum that the recursion comes to
                deltas = [gained[u] + values[u + 1] - values[u] for u in range(t, len(gained))]
                c.advantage.append(sum(delta * 0.95**k for k, delta in enumerate(deltas)))
            c.returns = [a + v for a, v in zip(c.advantage, values, strict=False)]
        elif algorithm == "reinforce_pp_baseline":
            c.advantage = [c.reward - float(rewards.mean()) - p for p in penalty]
        else:
            old_of = {id(p): p.lp.detach() if recompute else p.rollout for p in peers}
            net = torch.stack(
                [
                    torch.tensor(p.reward, dtype=torch.float64) - beta * kl_of(estimator, old_of[id(p)], p.ref).sum()
                    for p in peers
                ]
            )
            own = net[[p is c for p in peers].index(True)]
            if algorithm == "dr_grpo":
                advantage = own - net.mean()
            elif algorithm == "rloo":
                advantage = own - (net.sum() - own) / (len(peers) - 1)
            else:
                advantage = (own - net.mean()) / (net.std() + 1e-4)
            c.advantage = [float(advantage)] * len(c.lp)
    if algorithm in ("reinforce_pp", "reinforce_pp_baseline", "ppo"):
        every = torch.tensor([a for c in completions for a in c.advantage], dtype=torch.float64)
        for c in completions:
            c.advantage = [float((a - every.mean()) / torch.sqrt(every.var() + 1e-8)) for a in c.advantage]


def token_loss(algorithm: str, ratio: Tensor, lp: Tensor, a: float, low: float, high: float, dual: float) -> Tensor:
    if algorithm == "cispo":
        return -min(float(ratio.detach()), 1 + high) * a * lp
    seen = float(ratio.detach())
    held = max(1 - low, min(seen, 1 + high))
    loss = -ratio * a if seen * a <= held * a else torch.zeros_like(lp) - held * a
    if dual and a < 0 and float(loss.detach()) > -dual * a:
        return torch.zeros_like(lp) - dual * a
    return loss


def plain_algorithm(
    model: Qwen2ForCausalLM,
    groups: Sequence[experience_pb2.GroupTensors],
    algorithm: str,
    *,
    reference: Qwen2ForCausalLM,
    critic=None,
    low: float = 0.2,
    high: float = 0.2,
    dual: float = 0.0,
    beta: float = 0.0,
    kl: str = "k3",
    kl_in: str = "loss",
    recompute: bool = False,
    correct=None,
    length: int = 16,
) -> tuple[Tensor, Tensor]:
    """The policy's loss and the critic's; `correct` gives a completion's factors from its w [n]."""
    completions = read(groups, model, reference, critic)
    estimate(completions, algorithm, beta if kl_in == "reward" else 0.0, kl, recompute)
    tokens = sum(len(c.lp) for c in completions)
    counted = sum(len(c.lp) > 0 for c in completions)
    total, value_loss = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for c in completions:
        old = c.lp.detach() if recompute else c.rollout
        ratios = torch.exp(c.lp - old)
        if algorithm == "gspo" and len(c.lp):
            ratios = torch.exp((c.lp - old).mean()).expand(len(c.lp))
            if correct:  # a factor of a token weighs that token's gradient, not the whole completion's
                ratios = ratios.detach() * torch.exp(c.lp - c.lp.detach())
        factors = correct(torch.exp(old - c.rollout)) if correct else [1.0] * len(c.lp)
        for t, lp in enumerate(c.lp):
            loss = float(factors[t]) * token_loss(algorithm, ratios[t], lp, c.advantage[t], low, high, dual)
            if beta and kl_in == "loss":
                loss = loss + beta * kl_of(kl, lp, c.ref[t])
            weight = {"rloo": 1 / counted, "dr_grpo": 1 / (len(completions) * length)}.get(algorithm, 1 / tokens)
            if algorithm == "gspo":
                weight = 1 / (counted * len(c.lp))
            total = total + weight * loss
            if critic is not None:
                # The values are those before the step, so that the clip does nothing yet.
                value_loss = value_loss + 0.5 * (c.value[t] - c.returns[t]) ** 2 / tokens
    return total, value_loss
