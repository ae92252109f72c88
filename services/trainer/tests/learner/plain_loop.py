"""The same training in plain PyTorch, one completion at a time, sharing no code with the trainer, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from quartet.v1 import experience_pb2
from torch import Tensor
from transformers import Qwen2ForCausalLM

from quartet_common.tensors import decode, decode_ragged


def completion_log_probs(model: Qwen2ForCausalLM, prompt, tokens, temperature: float) -> Tensor:
    ids = torch.tensor([*prompt.tolist(), *tokens.tolist()])[None]
    logits = model(input_ids=ids).logits[0] / temperature
    log_probs = torch.log_softmax(logits, dim=-1)
    return torch.stack([log_probs[len(prompt) - 1 + i, token] for i, token in enumerate(tokens)])


def plain_loss(
    model: Qwen2ForCausalLM,
    groups: Sequence[experience_pb2.GroupTensors],
    *,
    algorithm: str = "grpo",
    aggregation: str = "token-mean",
    low: float = 0.2,
    high: float = 0.2,
    recompute: bool = False,
    tis_cap: float = 0.0,
    reference: Qwen2ForCausalLM | None = None,
    beta: float = 0.0,
    mask_truncated: bool = False,
    length: int = 16,
) -> Tensor:
    """The loss of a batch."""
    sequences: list[tuple[Tensor, Tensor]] = []
    for group in groups:
        prompt, rewards = decode(group.prompt_token_ids), torch.from_numpy(decode(group.rewards).copy()).double()
        masks = decode_ragged(group.loss_mask) if group.HasField("loss_mask") else []
        completions = zip(
            decode_ragged(group.completion_token_ids), decode_ragged(group.rollout_log_probs), strict=True
        )
        for index, (tokens, rollout) in enumerate(completions):
            others = torch.cat([rewards[:index], rewards[index + 1 :]])
            if algorithm in ("grpo", "dapo"):
                advantage = (rewards[index] - rewards.mean()) / (rewards.std() + 1e-4)
            elif algorithm == "dr_grpo":
                advantage = rewards[index] - rewards.mean()
            else:
                advantage = rewards[index] - others.mean()
            temperature = float(decode(group.temperatures)[index])
            lp = completion_log_probs(model, prompt, tokens, temperature)
            behaviour = torch.tensor(rollout.copy()).to(lp)
            old = lp.detach() if recompute else behaviour
            ratio = torch.exp(lp - old)
            loss = -torch.min(ratio * advantage, torch.clip(ratio, 1 - low, 1 + high) * advantage)
            if recompute and tis_cap:
                loss = torch.clip(torch.exp(old - behaviour), max=tis_cap) * loss
            if reference is not None:
                with torch.no_grad():
                    lp_reference = completion_log_probs(reference, prompt, tokens, temperature)
                loss = loss + beta * (torch.exp(lp_reference - lp) - (lp_reference - lp) - 1)
            mask = torch.tensor(masks[index].copy()).to(lp) if masks else torch.ones_like(lp)
            if mask_truncated and decode(group.truncated)[index]:
                mask = torch.zeros_like(lp)
            sequences.append((loss, mask))
    tokens_in_all = sum(mask.sum() for _, mask in sequences)
    counted = [(loss, mask) for loss, mask in sequences if mask.sum() > 0]
    total = sum((loss * mask).sum() for loss, mask in sequences)
    if aggregation == "token-mean":
        return total / tokens_in_all
    if aggregation == "sequence-mean-token-mean":
        return sum((loss * mask).sum() / mask.sum() for loss, mask in counted) / len(counted)
    if aggregation == "sequence-mean-token-sum":
        return total / len(counted)
    return total / (len(sequences) * length)


def load(path: Path, dtype: torch.dtype) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(path, torch_dtype=dtype, attn_implementation="sdpa")


def plain_training(
    path: Path, batches: Sequence[Sequence[experience_pb2.GroupTensors]], learning_rate: float, **loss_options
) -> list[float]:
    """Losses of one optimizer step per batch, in float32: AdamW, gradient norm held to 1."""
    model = load(path, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    losses = []
    for groups in batches:
        loss = plain_loss(model, groups, **loss_options)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
