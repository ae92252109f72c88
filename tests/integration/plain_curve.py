"""The training of `test_same_curve` in plain PyTorch in one process: `python plain_curve.py MODEL DUMP`.

It imports only the contract's messages from Quartet. DUMP has one JSON object per line: {"groups": [hex of
GroupTensors]}, the batches in order. It prints one JSON object for each step: `loss`, and `difference`, the largest
difference of the rollouts' log-probs from this model's before the step.
"""

import json
import sys

import numpy as np
import torch
from quartet.v1 import experience_pb2
from transformers import AutoModelForCausalLM

LEARNING_RATE, BETAS, CLIP_LOW, CLIP_HIGH, NORM, EPSILON = 3e-4, (0.9, 0.99), 0.2, 0.28, 1.0, 1e-4


def rows(ragged, dtype):
    ends = np.cumsum(ragged.lengths)
    return np.split(np.frombuffer(ragged.data, dtype), ends[:-1]) if len(ends) else []


def completions(groups):
    """Return prompt, tokens, log-probs, advantage (GRPO, unbiased std) and temperature of each completion."""
    for group in groups:
        prompt = np.frombuffer(group.prompt_token_ids.data, np.int32)
        rewards = torch.from_numpy(np.frombuffer(group.rewards.data, np.float32).copy()).double()
        advantages = (rewards - rewards.mean()) / (rewards.std() + EPSILON)
        tokens, log_probs = rows(group.completion_token_ids, np.int32), rows(group.rollout_log_probs, np.float32)
        temperatures = np.frombuffer(group.temperatures.data, np.float32)
        yield from zip([prompt] * len(tokens), tokens, log_probs, advantages, temperatures, strict=True)


def step(model, groups):
    """Return the batch's mean loss over tokens, and the largest difference of the rollouts' log-probs."""
    total, count, farthest = torch.zeros(()), 0, 0.0
    for prompt, tokens, old, advantage, temperature in completions(groups):
        ids = torch.tensor(np.concatenate([prompt, tokens])).long()[None]
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / float(temperature)
        new = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), ids[0, len(prompt) :]]
        old = torch.tensor(old.copy())
        farthest = max(farthest, float((new.detach() - old).abs().max()))
        ratio = torch.exp(new - old)
        clipped = torch.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
        total = total - torch.minimum(ratio * advantage, clipped * advantage).sum()
        count += len(tokens)
    return total / count, farthest


def main() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0)
    with open(sys.argv[2], encoding="utf-8") as lines:
        for line in lines:
            texts = json.loads(line)["groups"]
            groups = [experience_pb2.GroupTensors.FromString(bytes.fromhex(text)) for text in texts]
            loss, farthest = step(model, groups)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            print(json.dumps({"loss": loss.item(), "difference": farthest}))


if __name__ == "__main__":
    main()
