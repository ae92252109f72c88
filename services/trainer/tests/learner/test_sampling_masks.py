"""Log-probs over the candidates that a token was drawn from: against plain PyTorch, and refused where they are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_helpers import VOCABULARY, Run, make_group, make_learner
from quartet.v1 import experience_pb2, tensor_pb2
from transformers import Qwen2ForCausalLM

from quartet_common.tensors import decode, decode_ragged, encode_ragged
from quartet_trainer.batch import ExperienceError, collate, decode_groups
from quartet_trainer.learner import model as model_module

LENGTHS = [7, 3, 12]


def masked_group(seed: int = 0, **fields) -> tuple[experience_pb2.GroupTensors, list[list[np.ndarray]]]:
    """A group, and of each of its tokens the candidates; none (the whole vocabulary) for every fourth."""
    rng = np.random.default_rng(seed)
    group = make_group(rng, LENGTHS, mask=True, **fields)
    every = []
    for row in decode_ragged(group.completion_token_ids):
        candidates = []
        for place, token in enumerate(row):
            others = rng.choice(VOCABULARY, rng.integers(1, 9), replace=False)
            candidates.append(np.empty(0, np.int32) if place % 4 == 3 else np.unique([token, *others]).astype(np.int32))
        every.append(candidates)
    counts = [np.array([ids.size for ids in row], np.int32) for row in every]
    group.sampling_mask_counts.CopyFrom(encode_ragged(counts, tensor_pb2.DTYPE_INT32))
    ids = [np.concatenate(row) for row in every]
    group.sampling_mask_token_ids.CopyFrom(encode_ragged(ids, tensor_pb2.DTYPE_INT32))
    return group, every


def plain(path, group: experience_pb2.GroupTensors, every: list[list[np.ndarray]]) -> list[tuple[torch.Tensor, ...]]:
    """Log-prob and entropy of each trained token, a completion and a token at a time, from the model's own forward."""
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float64)
    prompt, found = decode(group.prompt_token_ids).tolist(), []
    rows = (decode_ragged(group.completion_token_ids), decode_ragged(group.loss_mask), decode(group.temperatures))
    for tokens, trained, temperature, candidates in zip(*rows, every, strict=True):
        logits = model(torch.tensor([prompt + tokens.tolist()])).logits[0, len(prompt) - 1 : -1] / float(temperature)
        for place, token in enumerate(tokens):
            if not trained[place]:
                continue
            ids = candidates[place].tolist() or list(range(VOCABULARY))
            chances = torch.softmax(logits[place, ids], dim=-1)
            found.append((chances[ids.index(int(token))].log(), -(chances * chances.log()).sum()))
    return found


@pytest.mark.parametrize("logits_at_once", [2**26, 5 * VOCABULARY])
def test_the_policy_is_confined_to_the_candidates(tmp_path, model_path, monkeypatch, logits_at_once) -> None:
    monkeypatch.setattr(model_module, "LOGITS_AT_ONCE", logits_at_once)
    group, every = masked_group()
    learner = make_learner(model_path, Run(sampling_masks=True), entropy_coefficient=0.1)
    batch = decode_groups([group], VOCABULARY, sampling_masks=True)
    plan = learner._planner.updates(batch, 0)[0]
    (completions,) = plan.micro_batches
    micro = collate(batch, plan, np.sort(completions)).to(torch.device("cpu"), torch.float64)
    log_probs, entropy = learner._plugin.model(*micro.inputs)
    expected = plain(model_path, group, every)
    torch.testing.assert_close(log_probs, torch.stack([one for one, _ in expected]), rtol=0, atol=1e-9)
    torch.testing.assert_close(entropy, torch.stack([one for _, one in expected]), rtol=0, atol=1e-9)
    unmasked = learner._plugin.model(*micro.inputs[:6])[0]
    assert (log_probs - unmasked).min() >= -1e-12 and (log_probs - unmasked).max() > 0.1

    (log_probs.sum() + entropy.sum()).backward()
    ours = {name: p.grad.clone() for name, p in learner._causal_lm.named_parameters()}
    reference = Qwen2ForCausalLM.from_pretrained(model_path, dtype=torch.float64)
    monkeypatch.setattr(Qwen2ForCausalLM, "from_pretrained", lambda *_, **__: reference)
    sum(one + other for one, other in plain(model_path, group, every)).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-7, atol=1e-9)


def test_masks_that_are_asked_for_must_be_there_and_hold_the_token() -> None:
    group, every = masked_group(seed=3)
    decode_groups([group], VOCABULARY, sampling_masks=True)
    ids = [np.concatenate(row) for row in every]
    ids[2][:] = 0
    group.sampling_mask_token_ids.CopyFrom(encode_ragged(ids, tensor_pb2.DTYPE_INT32))
    with pytest.raises(ExperienceError, match="lacks the token itself at"):
        decode_groups([group], VOCABULARY, sampling_masks=True)
    decode_groups([group], VOCABULARY)  # nobody asks for them
    group.ClearField("sampling_mask_counts")
    with pytest.raises(ExperienceError, match="group 0: sampling_mask_counts is missing"):
        decode_groups([group], VOCABULARY, sampling_masks=True)
