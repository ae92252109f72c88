"""A finished group as the contract's ExperienceGroup: tensors for the trainer, a transcript for people, a header."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, tensor_pb2

from quartet_common.durations import now_timestamp, to_duration
from quartet_common.sampling import to_message
from quartet_common.tensors import encode, encode_ragged
from quartet_rollout.engines.base import EngineCompletion, SamplingMask, SamplingSettings
from quartet_rollout.environments.conversation import PlayedCompletion, inserted_tokens


class Timings:
    """One group's, from the moment it is made: the beginning of the generation."""

    def __init__(self) -> None:
        self.started_at = now_timestamp()
        self._began = time.monotonic()
        self._generated: dict[int, float] = {}
        self._scored: dict[int, float] = {}

    def generated(self, index: int) -> None:
        """The last token of a completion is there."""
        self._generated[index] = time.monotonic() - self._began

    def score_awaited(self, index: int, score: "asyncio.Future[Any]") -> None:
        """Note when the score of a completion comes."""
        score.add_done_callback(partial(self._note_score, index))

    def _note_score(self, index: int, _: object) -> None:
        self._scored[index] = time.monotonic() - self._began

    def write(self, info: experience_pb2.CompletionInfo) -> None:
        """Put the times of a completion, which has all it will have, into what is said about it."""
        if (generated := self._generated.get(info.index)) is not None:
            info.generated_after.CopyFrom(to_duration(generated))
        if info.HasField("score"):
            # Not noted yet: it came in this very turn of the event loop.
            scored = self._scored.get(info.index, time.monotonic() - self._began)
            info.scored_after.CopyFrom(to_duration(scored))


FINISH_REASONS = {
    "stop": experience_pb2.FINISH_REASON_STOP,
    "length": experience_pb2.FINISH_REASON_LENGTH,
    "abort": experience_pb2.FINISH_REASON_ABORT,
}


def completion_info(completion: EngineCompletion, text: str) -> experience_pb2.CompletionInfo:
    """Return what there is to say about a completion besides its tensors."""
    info = experience_pb2.CompletionInfo(
        index=completion.index,
        text=text,
        finish_reason=FINISH_REASONS[completion.finish_reason],
        tokens=completion.token_ids.size,
        turns=completion.turns if isinstance(completion, PlayedCompletion) else 1,
        inserted_tokens=inserted_tokens(completion),
    )
    for version, begin, end in completion.version_spans:
        info.version_spans.add(policy_version=version, begin=begin, end=end)
    return info


def versions_of(completions: Sequence[EngineCompletion]) -> set[int]:
    """Return the policy versions that generated any token."""
    return {version for completion in completions for version, _, _ in completion.version_spans}


@dataclass
class GeneratedGroup:
    """A group whose completions stand.

    Attributes:
        items: what the reward service is asked, one of each completion in order of index; none where nobody asks.
        timings: when they were generated and scored; None: not known.
    """

    header: experience_pb2.GroupHeader
    tensors: experience_pb2.GroupTensors
    transcript: experience_pb2.GroupTranscript
    items: Sequence[reward_pb2.ScoreItem]
    timings: Timings | None = None

    @classmethod
    def of_unscored(cls, data: bytes, attempt: int) -> "GeneratedGroup":
        """Return what `unscored` kept, for another delivery. Scores that were found are left out: since then the
        verifier may have been mended, and the rewards of a group are compared with one another.
        """
        kept = experience_pb2.UnscoredGroup.FromString(data)
        group = cls(
            kept.group.header,
            experience_pb2.GroupTensors.FromString(kept.group.tensors),
            experience_pb2.GroupTranscript.FromString(kept.group.transcript),
            kept.items,
        )
        group.header.attempt = attempt
        for info in group.transcript.completions:
            info.ClearField("score")
            info.ClearField("scored_after")
        return group

    def scored(self, scores: Sequence[reward_pb2.Score]) -> experience_pb2.ExperienceGroup:
        """Return the finished group. `scores`: one of each completion, or none where nobody was asked."""
        if scores:
            for field, key in (("rewards", "reward"), ("format_acc", "format_acc"), ("ans_acc", "ans_acc")):
                values = np.asarray([getattr(score, key) for score in scores], dtype=np.float32)
                getattr(self.tensors, field).CopyFrom(encode(values))
            rewards = np.asarray([score.reward for score in scores])
            self.header.reward_mean = rewards.mean()
            self.header.reward_std = rewards.std(ddof=1) if len(scores) > 1 else 0.0
            judged = [score.ans_acc for score in scores if not score.unjudged]
            self.header.ans_acc = sum(judged) / len(judged) if judged else 0.0
            self.header.unjudged = len(scores) - len(judged)
            if self.header.unjudged:
                mask = np.asarray([not score.unjudged for score in scores], dtype=np.uint8)
                self.tensors.ans_judged.CopyFrom(encode(mask))
        return self._group(scores)

    def unscored(self, scores: Sequence[reward_pb2.Score | None]) -> bytes:
        """Return a serialized UnscoredGroup. `scores`: those that were found."""
        return experience_pb2.UnscoredGroup(group=self._group(scores), items=self.items).SerializeToString()

    def _group(self, scores: Sequence[reward_pb2.Score | None]) -> experience_pb2.ExperienceGroup:
        for info, score in zip(self.transcript.completions, scores, strict=False):
            if score is not None:
                info.score.CopyFrom(score)
        if self.timings is not None:
            for info in self.transcript.completions:
                self.timings.write(info)
        self.transcript.finished_at.CopyFrom(now_timestamp())  # not before any of them
        return experience_pb2.ExperienceGroup(
            header=self.header,
            tensors=self.tensors.SerializeToString(),
            transcript=self.transcript.SerializeToString(),
        )


def generated_group(
    lease: broker_pb2.PromptLease,
    prompt_token_ids: np.ndarray,
    prompt_text: str,
    completions: Sequence[tuple[EngineCompletion, str]],
    items: Mapping[int, reward_pb2.ScoreItem],
    settings: SamplingSettings,
    rollout_id: str,
    timings: Timings,
) -> GeneratedGroup:
    """Return the group, its completions in order of index.

    Args:
        prompt_token_ids: int32 [P].
        completions: all completions of the group with their texts, in any order, at least one token among them.
        items: what the reward service is asked, by index; empty where nobody asks.
        settings: how they were sampled.
    """
    completions = sorted(completions, key=lambda one: one[0].index)
    transcript = experience_pb2.GroupTranscript(
        instance=lease.instance,
        prompt_text=prompt_text,
        completions=[completion_info(completion, text) for completion, text in completions],
        rollout_id=rollout_id,
        started_at=timings.started_at,
    )
    plain = [completion for completion, _ in completions]
    tensors = _tensors(prompt_token_ids, plain, settings)
    return GeneratedGroup(_header(lease, plain), tensors, transcript, [items[i] for i in sorted(items)], timings)


def _tensors(
    prompt_token_ids: np.ndarray, completions: Sequence[EngineCompletion], settings: SamplingSettings
) -> experience_pb2.GroupTensors:
    spans = [np.asarray(completion.version_spans, dtype=np.int64).reshape(-1) for completion in completions]
    truncated = np.asarray([completion.finish_reason == "length" for completion in completions], dtype=np.uint8)
    tensors = experience_pb2.GroupTensors(
        prompt_token_ids=encode(np.asarray(prompt_token_ids, dtype=np.int32)),
        completion_token_ids=encode_ragged([one.token_ids for one in completions], tensor_pb2.DTYPE_INT32),
        rollout_log_probs=encode_ragged([one.log_probs for one in completions], tensor_pb2.DTYPE_FLOAT32),
        temperatures=encode(np.full(len(completions), settings.temperature, dtype=np.float32)),
        truncated=encode(truncated),
        version_spans=encode_ragged(spans, tensor_pb2.DTYPE_INT64),
        sampling=to_message(settings),
    )
    tensors.sampling.n = len(completions)
    if settings.masks:
        given = [one.mask or SamplingMask.nothing_cut(one.token_ids.size) for one in completions]
        counts, ids = [mask.counts for mask in given], [mask.token_ids for mask in given]
        tensors.sampling_mask_counts.CopyFrom(encode_ragged(counts, tensor_pb2.DTYPE_INT32))
        tensors.sampling_mask_token_ids.CopyFrom(encode_ragged(ids, tensor_pb2.DTYPE_INT32))
    if settings.routed_experts:
        _put_routed_experts(tensors, len(prompt_token_ids), [one.routed_experts for one in completions])
    if any(inserted_tokens(one) for one in completions):
        masks = [getattr(one, "loss_mask", np.ones(one.token_ids.size, np.uint8)) for one in completions]
        tensors.loss_mask.CopyFrom(encode_ragged(masks, tensor_pb2.DTYPE_UINT8))
    return tensors


def _put_routed_experts(
    tensors: experience_pb2.GroupTensors, prompt_tokens: int, of_completions: Sequence[np.ndarray | None]
) -> None:
    """Those of the prompt are the first completion's."""
    found = [experts for experts in of_completions if experts is not None]
    if len(found) < len(of_completions):
        raise ValueError("the engine returned a completion without the experts that its tokens went to")
    dtype = tensor_pb2.DTYPE_UINT8 if found[0].dtype == np.uint8 else tensor_pb2.DTYPE_INT32
    tensors.prompt_routed_experts.CopyFrom(encode(found[0][:prompt_tokens]))
    rows = [experts[prompt_tokens:].reshape(-1) for experts in found]
    tensors.completion_routed_experts.CopyFrom(encode_ragged(rows, dtype))


def _header(lease: broker_pb2.PromptLease, completions: Sequence[EngineCompletion]) -> experience_pb2.GroupHeader:
    versions = versions_of(completions)
    return experience_pb2.GroupHeader(
        instance_id=lease.instance.instance_id,
        purpose=lease.instance.purpose,
        min_policy_version=min(versions),
        max_policy_version=max(versions),
        completions=len(completions),
        completion_tokens=sum(one.token_ids.size for one in completions),
        attempt=lease.attempt,
    )
