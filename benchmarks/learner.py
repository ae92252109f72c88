"""One optimizer step of the demo's size, beside the same step in plain PyTorch.

Ours: `Learner.train_step`, from the groups' messages to metrics: decoding, advantages, log-probs, loss, gradient,
clipping, AdamW, metrics.

Peer: a plain loop over the same completions in the same micro-batches with the same right padding: the model's logits,
log-softmax, the clipped loss, backward, gradient clipping, torch's AdamW. Its token ids, advantages and padding are
tensors already, prepared outside the measured time; it computes no metrics. The difference is the cost of Quartet's
learner. The learner is measured twice: with prompts computed for each completion, as the peer does, and with each
prompt computed once for its group, the default (`trainer.share_prompts`).

The batch is 16 groups of 8 completions of about 21 tokens after prompts of 9, as the demo's; or 4 groups of 8 of about
48 after prompts of 256. Rewards 0 and 1 are mixed in every group, so that none is skipped; the model is the demo's, of
312,000 parameters. Both run on one thread. The two losses must agree with each other and with
`services/trainer/tests/learner/reference.py`, which shares no code with either.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import ROOT, Figure, in_turn, report, seconds_of

sys.path.extend(
    [f"{ROOT}/services/trainer/tests", f"{ROOT}/services/trainer/tests/learner", f"{ROOT}/examples/arithmetic"]
)

import reference
from learner_helpers import Run, make_group
from model import build_model, build_tokenizer, save
from quartet.v1 import experience_pb2

from quartet_common.tensors import decode, decode_ragged
from quartet_trainer.batch import decode_groups
from quartet_trainer.learner import LearnerSettings, create_learner

COMPLETIONS = 8
LEARNING_RATE, CLIP_LOW, CLIP_HIGH = 3e-4, 0.2, 0.28
ROUNDS = 11


@dataclass(frozen=True)
class Size:
    """A batch."""

    groups: int
    prompt_tokens: int
    shortest: int
    longest: int
    """Tokens of a completion."""


DEMO, LONG_PROMPTS = Size(16, 9, 12, 30), Size(4, 256, 32, 64)


@dataclass
class PlainBatch:
    """A micro-batch of M completions, padded to L."""

    ids: torch.Tensor  # int64 [M, L]
    trained: torch.Tensor  # bool [M, L-1]: what position predicts a completion's token
    rollout: torch.Tensor  # float32 [M, L-1]
    advantages: torch.Tensor  # float32 [M, 1]


def make_batch(size: Size) -> list[experience_pb2.GroupTensors]:
    rng = np.random.default_rng(0)
    rewards = [1.0, 0.0] * (COMPLETIONS // 2)
    return [
        make_group(
            rng,
            [int(length) for length in rng.integers(size.shortest, size.longest + 1, COMPLETIONS)],
            prompt=size.prompt_tokens,
            rewards=rewards,
            temperature=1.0,
        )
        for _ in range(size.groups)
    ]


def plain_batches(
    groups: Sequence[experience_pb2.GroupTensors], micro_batches: Sequence[np.ndarray]
) -> list[PlainBatch]:
    """The groups as padded tensors, cut at `micro_batches` (indices of completions)."""
    completions = []
    for group in groups:
        rewards = torch.from_numpy(decode(group.rewards).copy())
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        rows = zip(decode_ragged(group.completion_token_ids), decode_ragged(group.rollout_log_probs), strict=True)
        for (tokens, log_probs), advantage in zip(rows, advantages, strict=True):
            completions.append((decode(group.prompt_token_ids), tokens, log_probs, advantage))
    batches = []
    for chosen in micro_batches:
        rows = [completions[index] for index in chosen]
        longest = max(len(prompt) + len(tokens) for prompt, tokens, _, _ in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        trained = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
        rollout = torch.zeros(len(rows), longest - 1)
        for row, (prompt, tokens, log_probs, _) in enumerate(rows):
            begin, end = len(prompt), len(prompt) + len(tokens)
            ids[row, :end] = torch.tensor([*prompt.tolist(), *tokens.tolist()])
            trained[row, begin - 1 : end - 1] = True
            rollout[row, begin - 1 : end - 1] = torch.from_numpy(log_probs.copy())
        batches.append(PlainBatch(ids, trained, rollout, torch.stack([row[3] for row in rows])[:, None]))
    return batches


class PlainTraining:
    """The peer."""

    def __init__(self, path: Path, batches: list[PlainBatch]):
        self._model = reference.load(path, torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self._batches = batches
        self._tokens = sum(int(batch.trained.sum()) for batch in batches)

    def train_step(self) -> float:
        """Return the loss."""
        total = 0.0
        for batch in self._batches:
            logits = self._model(input_ids=batch.ids, use_cache=False).logits[:, :-1]
            log_probs = torch.log_softmax(logits, dim=-1).gather(-1, batch.ids[:, 1:, None])[..., 0]
            ratio = torch.exp(log_probs - batch.rollout)
            clipped = torch.clip(ratio, 1 - CLIP_LOW, 1 + CLIP_HIGH)
            losses = -torch.min(ratio * batch.advantages, clipped * batch.advantages)
            loss = (losses * batch.trained).sum() / self._tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total


def main() -> None:
    torch.set_num_threads(1)
    report(*compare(DEMO), *compare(LONG_PROMPTS))


def compare(size: Size) -> list[Figure]:
    """Return the learner's steps beside the peer's."""
    groups = make_batch(size)
    settings = LearnerSettings(
        learning_rate=LEARNING_RATE, algorithm={"name": "grpo", "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH}
    )
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        save(build_model(0), build_tokenizer(), path)
        apart = create_learner(settings.model_copy(update={"share_prompts": False}), path, Run())
        learner = create_learner(settings, path, Run())
        micro_batches = apart._planner.updates(decode_groups(groups, 128), 0)[0].micro_batches
        plain = PlainTraining(path, plain_batches(groups, micro_batches))
        with torch.no_grad():
            model = reference.load(path, torch.float32)
            expected = reference.batch_loss(model, groups, {"clip_low": CLIP_LOW, "clip_high": CLIP_HIGH})[0].item()
    losses = {
        "the learner, prompts apart": apart.train_step(groups)["loss"],
        "the learner": learner.train_step(groups)["loss"],
        "the peer": plain.train_step(),
    }
    for name, found in losses.items():
        if abs(found - expected) > 1e-4:
            raise RuntimeError(
                f"{name} has loss {found:.6f} where {expected:.6f} is right: there is nothing to compare"
            )

    def peer() -> float:
        return 1000 * seconds_of(plain.train_step)

    def compared(name: str, ours: Any) -> Figure:
        def step() -> float:
            return 1000 * seconds_of(lambda: ours.train_step(groups))

        peer_name = f"plain PyTorch, {len(micro_batches)} padded batches"
        return Figure(f"learner: {name}", "ms", *in_turn(step, peer, ROUNDS, warm_up=2), peer_name, "lower")

    batch = f"step of {size.groups * COMPLETIONS} completions, prompts of {size.prompt_tokens} tokens"
    return [compared(f"{batch}, apart", apart), compared(f"{batch}, shared", learner)]


if __name__ == "__main__":
    main()
