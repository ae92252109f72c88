"""A finished group as the contract's ExperienceGroup: tensors for the trainer, a transcript for people, a header."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, tensor_pb2

from quartet_common.durations import now_timestamp
from quartet_common.tensors import encode, encode_ragged
from quartet_rollout.engines.base import EngineCompletion, SamplingMask, SamplingSettings
from quartet_rollout.environments.conversation import PlayedCompletion, inserted_tokens
from quartet_rollout.stamps import Stamps

FINISH_REASONS = {
    "stop": experience_pb2.FINISH_REASON_STOP,
    "length": experience_pb2.FINISH_REASON_LENGTH,
    "abort": experience_pb2.FINISH_REASON_ABORT,
}


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion, its text, and what the reward service said; None where nobody asked it (serving)."""

    completion: EngineCompletion
    text: str
    score: reward_pb2.Score | None


def completion_info(
    completion: EngineCompletion, text: str, score: reward_pb2.Score | None = None
) -> experience_pb2.CompletionInfo:
    """Return what there is to say about a completion besides its tensors."""
    info = experience_pb2.CompletionInfo(
        index=completion.index,
        text=text,
        finish_reason=FINISH_REASONS[completion.finish_reason],
        tokens=completion.token_ids.size,
        score=score,
        turns=completion.turns if isinstance(completion, PlayedCompletion) else 1,
        inserted_tokens=inserted_tokens(completion),
    )
    for version, begin, end in completion.version_spans:
        info.version_spans.add(policy_version=version, begin=begin, end=end)
    return info


def versions_of(completions: Sequence[EngineCompletion]) -> set[int]:
    """Return the policy versions that generated any token."""
    return {version for completion in completions for version, _, _ in completion.version_spans}


def build_group(
    lease: broker_pb2.PromptLease,
    prompt_token_ids: np.ndarray,
    prompt_text: str,
    scored: Sequence[ScoredCompletion],
    settings: SamplingSettings,
    rollout_id: str,
    stamps: Stamps,
) -> experience_pb2.ExperienceGroup:
    """Return the group, its completions in order of index.

    Args:
        prompt_token_ids: int32 [P].
        scored: all completions of the group, in any order, at least one token among them.
        settings: what they were drawn by.
        stamps: when they were generated and scored.
    """
    scored = sorted(scored, key=lambda one: one.completion.index)
    tensors = _tensors(prompt_token_ids, scored, settings)
    transcript = experience_pb2.GroupTranscript(
        instance=lease.instance,
        prompt_text=prompt_text,
        completions=[completion_info(one.completion, one.text, one.score) for one in scored],
        rollout_id=rollout_id,
        started_at=stamps.started_at,
    )
    for info in transcript.completions:
        stamps.write(info)
    transcript.finished_at.CopyFrom(now_timestamp())  # not before any of them
    return experience_pb2.ExperienceGroup(
        header=_header(lease, scored),
        tensors=tensors.SerializeToString(),
        transcript=transcript.SerializeToString(),
    )


def _tensors(
    prompt_token_ids: np.ndarray, scored: Sequence[ScoredCompletion], settings: SamplingSettings
) -> experience_pb2.GroupTensors:
    completions = [one.completion for one in scored]
    spans = [np.asarray(completion.version_spans, dtype=np.int64).reshape(-1) for completion in completions]
    truncated = np.asarray([completion.finish_reason == "length" for completion in completions], dtype=np.uint8)
    tensors = experience_pb2.GroupTensors(
        prompt_token_ids=encode(np.asarray(prompt_token_ids, dtype=np.int32)),
        completion_token_ids=encode_ragged([one.token_ids for one in completions], tensor_pb2.DTYPE_INT32),
        rollout_log_probs=encode_ragged([one.log_probs for one in completions], tensor_pb2.DTYPE_FLOAT32),
        temperatures=encode(np.full(len(completions), settings.temperature, dtype=np.float32)),
        truncated=encode(truncated),
        version_spans=encode_ragged(spans, tensor_pb2.DTYPE_INT64),
    )
    if settings.masks:
        given = [one.mask or SamplingMask.nothing_cut(one.token_ids.size) for one in completions]
        counts, ids = [mask.counts for mask in given], [mask.token_ids for mask in given]
        tensors.sampling_mask_counts.CopyFrom(encode_ragged(counts, tensor_pb2.DTYPE_INT32))
        tensors.sampling_mask_token_ids.CopyFrom(encode_ragged(ids, tensor_pb2.DTYPE_INT32))
    if any(inserted_tokens(one) for one in completions):
        masks = [getattr(one, "loss_mask", np.ones(one.token_ids.size, np.uint8)) for one in completions]
        tensors.loss_mask.CopyFrom(encode_ragged(masks, tensor_pb2.DTYPE_UINT8))
    if all(one.score is not None for one in scored):
        for field, key in (("rewards", "reward"), ("format_acc", "format_acc"), ("ans_acc", "ans_acc")):
            values = np.asarray([getattr(one.score, key) for one in scored], dtype=np.float32)
            getattr(tensors, field).CopyFrom(encode(values))
    return tensors


def _header(lease: broker_pb2.PromptLease, scored: Sequence[ScoredCompletion]) -> experience_pb2.GroupHeader:
    versions = versions_of([one.completion for one in scored])
    scores = [one.score for one in scored if one.score is not None]
    rewards = np.asarray([score.reward for score in scores])
    return experience_pb2.GroupHeader(
        instance_id=lease.instance.instance_id,
        purpose=lease.instance.purpose,
        min_policy_version=min(versions),
        max_policy_version=max(versions),
        completions=len(scored),
        completion_tokens=sum(one.completion.token_ids.size for one in scored),
        reward_mean=rewards.mean() if scores else 0.0,
        reward_std=rewards.std(ddof=1) if len(scores) > 1 else 0.0,
        attempt=lease.attempt,
        ans_acc=float(np.mean([score.ans_acc for score in scores])) if scores else 0.0,
    )
