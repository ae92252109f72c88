"""From the wire to a micro-batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from learner_helpers import VOCABULARY, make_batch, make_group
from quartet.v1 import experience_pb2

from quartet_common.tensors import decode, decode_ragged, encode
from quartet_trainer.batch import ExperienceError, collate, decode_group, decode_groups, plan_step
from quartet_trainer.learner import LearnerSettings
from quartet_trainer.records.step_metrics import batch_metrics


def plan_all(batch, **values):
    ones = torch.ones(batch.rows.numel(), dtype=torch.float64)
    defaults = {
        "mask": batch.loss_mask,
        "weights": ones,
        "advantages": ones,
        "skip_zero_advantage": True,
        "micro_batch_tokens": 10_000,
        "max_padding": LearnerSettings().max_padding,
        "rank": 0,
        "world_size": 1,
    }
    return plan_step(batch, **{**defaults, **values})


def test_a_micro_batch_holds_exactly_what_the_groups_say() -> None:
    groups = make_batch(seed=1, groups=3)
    batch = decode_groups(groups, VOCABULARY)
    plan = plan_all(batch)
    seen = 0
    for completions in plan.micro_batches:
        micro = collate(batch, plan, completions)
        for row, completion in enumerate(completions):
            group = groups[completion // 4]
            prompt = decode(group.prompt_token_ids)
            tokens = decode_ragged(group.completion_token_ids)[completion % 4]
            log_probs = decode_ragged(group.rollout_log_probs)[completion % 4]
            masks = decode_ragged(group.loss_mask) if group.HasField("loss_mask") else []
            mask = masks[completion % 4].astype(bool) if masks else np.ones(tokens.size, dtype=bool)
            text = np.concatenate([prompt, tokens])
            assert micro.input_ids[row, : text.size].tolist() == text.tolist()
            assert (micro.input_ids[row, text.size :] == 0).all()
            mine = micro.rows == row
            assert micro.targets[mine].tolist() == tokens[mask].tolist()
            # The position before a token predicts it: the prompt's last one is the first.
            assert micro.columns[mine].tolist() == (np.flatnonzero(mask) + prompt.size - 1).tolist()
            assert micro.rollout_log_probs[mine].tolist() == log_probs[mask].tolist()
            assert (micro.temperatures[mine] == decode(group.temperatures)[completion % 4].item()).all()
            seen += mask.sum()
    assert seen == batch.loss_mask.sum()


LENGTHS = {
    "lognormal": lambda rng: rng.lognormal(4.5, 1.0, 8).clip(1, 2000),
    "one long": lambda rng: np.array([1500, *[30] * 7]) + rng.integers(0, 5, 8),
}


@pytest.mark.parametrize("draw", LENGTHS)
def test_micro_batches_hold_each_completion_once_within_the_budget_and_with_little_padding(draw: str) -> None:
    rng = np.random.default_rng(1)
    groups = [make_group(rng, LENGTHS[draw](rng).astype(int).tolist(), prompt=12) for _ in range(32)]
    batch = decode_groups(groups, VOCABULARY)
    lengths = (batch.prompt_lengths + batch.completion_lengths).numpy()
    assert 1 - lengths.sum() / (lengths.max() * lengths.size) > 0.3, "padded to the longest, much would be wasted"
    for ranks in (1, 2, 3):
        plans = [plan_all(batch, micro_batch_tokens=8192, rank=rank, world_size=ranks) for rank in range(ranks)]
        cuts = [cut for plan in plans for cut in plan.micro_batches]
        assert sorted(np.concatenate(cuts).tolist()) == list(range(256))
        assert max(lengths[cut].max() * cut.size for cut in cuts) <= 8192
        padded = [sum(lengths[cut].max() * cut.size for cut in plan.micro_batches) for plan in plans]
        assert 1 - lengths.sum() / sum(padded) < 0.1
        assert max(padded) < 1.15 * min(padded)


def test_a_completion_longer_than_the_budget_is_alone() -> None:
    batch = decode_groups([make_group(np.random.default_rng(0), [30, 3, 3])], VOCABULARY)
    cuts = plan_all(batch, micro_batch_tokens=16).micro_batches
    assert [cut.tolist() for cut in cuts] == [[0], [1, 2]]


@pytest.mark.parametrize(
    ("field", "content", "message"),
    [
        ("prompt_token_ids", np.zeros(0, np.int32), "is empty; a prompt has at least one token"),
        ("prompt_token_ids", np.array([3, VOCABULARY], np.int32), "has ids from 3 to 64; this model's are 0 to 63"),
        ("rewards", np.zeros(3, np.float64), "is float64; the contract says float32"),
        ("rewards", np.zeros(2, np.float32), "has 2 values for 3 completions"),
        ("rewards", np.array([0, np.nan, 1], np.float32), "has values that are not finite"),
        (
            "temperatures",
            np.array([1, 1e-10, 1], np.float32),
            "has 1e-10; only completions sampled at 1e-06 or above can be trained on",
        ),
        ("version_spans", None, "is unspecified; the contract says int64"),
        ("completion_token_ids", [2**31 - 1, 3, 2], "has 10 elements in rows of 2147483652"),
        ("completion_token_ids", b"cut off", "has 9 elements in rows of 10"),
    ],
)
def test_bad_groups_are_refused_in_one_sentence(field: str, content: Any, message: str) -> None:
    """`content` in place of a field's: an array, other row lengths, bytes that are cut off, or nothing."""
    rng = np.random.default_rng(0)
    groups = [make_group(rng, [5, 3, 2]), make_group(rng, [5, 3, 2])]
    tensor = getattr(groups[1], field)
    if isinstance(content, bytes):
        tensor.data = tensor.data[:-4]
    elif isinstance(content, list):
        tensor.lengths[:] = content
    elif content is None:
        groups[1].ClearField(field)
    else:
        tensor.CopyFrom(encode(content))
    with pytest.raises(ExperienceError) as refusal:
        decode_groups(groups, VOCABULARY)
    assert str(refusal.value) == f"group 1: {field} {message}"


def test_groups_whose_log_probs_are_not_the_models_are_refused() -> None:
    """Recorded with the group; what only removes candidates, or bounds a completion, is trained."""
    group = make_group(np.random.default_rng(0), [5, 3, 2])
    harmless = {"temperature": 0.5, "top_p": 0.9, "min_tokens": 2, "bad_words": ["no"], "stop": ["x"]}
    group.sampling.CopyFrom(experience_pb2.SamplingParams(**harmless))
    decode_group(group, VOCABULARY)
    group.sampling.repetition_penalty = 1.5
    with pytest.raises(ExperienceError, match="its completions were drawn with repetition_penalty = 1.5: their log-pr"):
        decode_group(group, VOCABULARY)


def test_bytes_that_are_changed_at_random_are_refused_or_harmless() -> None:
    """What is accepted has a micro-batch and metrics; nothing but the two refusals is raised."""
    chance, outcomes = np.random.default_rng(1), set()
    for seed in range(2000):
        (group,) = make_batch(seed=seed, groups=1, size=2, longest=4)
        data = bytearray(group.SerializeToString())
        for place in chance.integers(len(data), size=chance.integers(1, 3)):
            data[place] = chance.integers(256)
        try:
            group = experience_pb2.GroupTensors.FromString(bytes(data[: len(data) - 3 * (seed % 10 == 0)]))
            decode_group(group, VOCABULARY)
        except (DecodeError, ExperienceError) as refusal:
            outcomes.add(type(refusal))
            continue
        batch = decode_groups([group], VOCABULARY)
        plan = plan_all(batch)
        collate(batch, plan, plan.micro_batches[0])
        batch_metrics(0, [group], [experience_pb2.GroupHeader()])
        outcomes.add(None)
    assert outcomes == {DecodeError, ExperienceError, None}
