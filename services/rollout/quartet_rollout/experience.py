"""A finished group as an ExperienceGroup: tensors for the trainer, a readable transcript, a header."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, tensor_pb2

from quartet_common.durations import now_timestamp
from quartet_common.sampling import to_message
from quartet_common.tensors import decode, encode, encode_ragged
from quartet_common.verifier_scores import verifier_means
from quartet_rollout.engines.base import UNKNOWN_VERSION, EngineCompletion, SamplingMask, SamplingSettings
from quartet_rollout.environments.conversation import PlayedCompletion, inserted_tokens


def completion_info(completion: EngineCompletion, text: str) -> experience_pb2.CompletionInfo:
    """Return a completion's entry in the transcript."""
    info = experience_pb2.CompletionInfo(
        index=completion.index,
        text=text,
        finish_reason=f"FINISH_REASON_{completion.finish_reason.upper()}",
        tokens=completion.token_ids.size,
        turns=completion.turns if isinstance(completion, PlayedCompletion) else 1,
        inserted_tokens=inserted_tokens(completion),
        episode=completion.index,
    )
    for version, begin, end in completion.version_spans:
        info.version_spans.add(policy_version=version, begin=begin, end=end)
    if isinstance(completion, PlayedCompletion) and completion.has_turn_rewards:
        for end, reward in zip(completion.turn_ends, completion.turn_rewards, strict=True):
            info.turn_infos.add(end=end, reward=reward)
        total = sum(filter(None, completion.turn_rewards))
        info.environment.MergeFrom(reward_pb2.Score(outcome=reward_pb2.OUTCOME_UNJUDGED, unjudged=True, reward=total))
        info.environment.verifiers.add(name="turns", reward=total, weight=1.0, outcome=reward_pb2.OUTCOME_UNJUDGED)
    return info


def versions_of(completions: Sequence[EngineCompletion]) -> set[int]:
    """Return the policy versions that generated any token."""
    return {version for completion in completions for version, _, _ in completion.version_spans}


@dataclass
class GeneratedGroup:
    """A group with all completions; scores are written into its transcript as they arrive.

    Attributes:
        items: score items of the completions in order of index; empty if they are not scored.
    """

    header: experience_pb2.GroupHeader
    tensors: experience_pb2.GroupTensors
    transcript: experience_pb2.GroupTranscript
    items: Sequence[reward_pb2.ScoreItem]

    @classmethod
    def of_unscored(cls, data: bytes, attempt: int) -> "GeneratedGroup":
        """Parse the result of `unscored`, in another delivery. Earlier scores are removed: the rewards of a group are
        compared with one another, and the verifier may have been corrected since.
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

    def scored(self) -> experience_pb2.ExperienceGroup:
        """Return the finished group, with all scores if it is scored."""
        self._add_environments()
        if self.transcript.completions[0].HasField("score"):
            scores = [info.score for info in self.transcript.completions]
            for field, key in (("rewards", "reward"), ("format_acc", "format_acc"), ("ans_acc", "ans_acc")):
                values = np.asarray([getattr(score, key) for score in scores], dtype=np.float32)
                getattr(self.tensors, field).CopyFrom(encode(values))
            rewards = np.asarray([score.reward for score in scores])
            self.header.reward_mean = rewards.mean()
            seats = np.asarray([info.seat for info in self.transcript.completions])
            of_seats = [rewards[seats == seat] for seat in dict.fromkeys(seats)]
            self.header.reward_std = np.mean([each.std(ddof=1) if each.size > 1 else 0.0 for each in of_seats])
            judged = [score.ans_acc for score in scores if not score.unjudged]
            self.header.ans_acc = sum(judged) / len(judged) if judged else 0.0
            self.header.verifiers.extend(verifier_means(self.transcript.completions))
            self.header.unjudged = len(scores) - len(judged)
            if self.header.unjudged:
                mask = np.asarray([not score.unjudged for score in scores], dtype=np.uint8)
                self.tensors.ans_judged.CopyFrom(encode(mask))
        return self._group()

    def _add_environments(self) -> None:
        """Make the scores of served environments part of their completions'."""
        added = [info.score.reward for info in self.transcript.completions]
        for info in self.transcript.completions:
            if info.HasField("score") and info.HasField("environment"):
                _add(info.score, info.environment)
            elif info.HasField("environment"):
                info.score.CopyFrom(info.environment)
        if self.tensors.HasField("outcome_rewards") and any(added):
            outcomes = decode(self.tensors.outcome_rewards) + np.asarray(added, np.float32)
            self.tensors.outcome_rewards.CopyFrom(encode(outcomes))

    def unscored(self) -> bytes:
        """Return a serialized UnscoredGroup, with the scores found so far."""
        return experience_pb2.UnscoredGroup(group=self._group(), items=self.items).SerializeToString()

    def _group(self) -> experience_pb2.ExperienceGroup:
        self.transcript.finished_at.CopyFrom(now_timestamp())
        return experience_pb2.ExperienceGroup(
            header=self.header,
            tensors=self.tensors.SerializeToString(),
            transcript=self.transcript.SerializeToString(),
        )


def group_tensors(
    prompts: Sequence[np.ndarray], completions: Sequence[EngineCompletion], settings: SamplingSettings
) -> experience_pb2.GroupTensors:
    """Return a group's tensors, without scores.

    Args:
        prompts: int32 [P], that of each completion.
        completions: all of the group in order of index, with at least one token in all.
        settings: how they were sampled.
    """
    spans = [np.asarray(completion.version_spans, dtype=np.int64).reshape(-1) for completion in completions]
    truncated = np.asarray([completion.finish_reason == "length" for completion in completions], dtype=np.uint8)
    tensors = experience_pb2.GroupTensors(
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
    put_prompts(tensors, prompts, always=False)
    if settings.routed_experts:
        _put_routed_experts(tensors, prompts, [one.routed_experts for one in completions])
    if any(inserted_tokens(one) for one in completions):
        masks = [getattr(one, "loss_mask", np.ones(one.token_ids.size, np.uint8)) for one in completions]
        tensors.loss_mask.CopyFrom(encode_ragged(masks, tensor_pb2.DTYPE_UINT8))
    return tensors


def _add(score: reward_pb2.Score, of_environment: reward_pb2.Score) -> None:
    verified = list(score.verifiers)
    del score.verifiers[:]
    score.verifiers.extend([*of_environment.verifiers, *verified])
    score.reward += of_environment.reward
    score.reason = "; ".join(filter(None, (of_environment.reason, score.reason)))


def put_prompts(tensors: experience_pb2.GroupTensors, prompts: Sequence[np.ndarray], always: bool) -> None:
    """Set the one prompt of all rows, or each once with the rows that begin with it; `always`: in the second form."""
    distinct = {prompt.tobytes(): prompt for prompt in prompts}
    tensors.ClearField("prompt_token_ids")
    if len(distinct) == 1 and not always:
        tensors.prompt_token_ids.CopyFrom(encode(np.asarray(prompts[0], dtype=np.int32)))
        return
    numbers = {prompt: number for number, prompt in enumerate(distinct)}
    of_rows = [numbers[prompt.tobytes()] for prompt in prompts]
    tensors.prompts.CopyFrom(encode_ragged(list(distinct.values()), tensor_pb2.DTYPE_INT32))
    tensors.row_prompts.CopyFrom(encode(np.asarray(of_rows, np.int32)))


def put_turns(
    tensors: experience_pb2.GroupTensors,
    rows: Sequence[PlayedCompletion],
    indices: Sequence[Sequence[int]],
    rewards: Sequence[Sequence[float | None]],
) -> None:
    """Set the turns of all rows: for each, their positions in its completion, and their rewards."""
    ends = [np.asarray(row.turn_ends, np.int32) for row in rows]
    tensors.turn_ends.CopyFrom(encode_ragged(ends, tensor_pb2.DTYPE_INT32))
    positions = [np.asarray(each, np.int32) for each in indices]
    tensors.turn_indices.CopyFrom(encode_ragged(positions, tensor_pb2.DTYPE_INT32))
    given = [np.asarray([reward or 0.0 for reward in each], np.float32) for each in rewards]
    tensors.turn_rewards.CopyFrom(encode_ragged(given, tensor_pb2.DTYPE_FLOAT32))


def _put_routed_experts(
    tensors: experience_pb2.GroupTensors,
    prompts: Sequence[np.ndarray],
    of_completions: Sequence[np.ndarray | None],
) -> None:
    """Set the tensors of routed experts; a prompt's are taken from its first completion."""
    found = [experts for experts in of_completions if experts is not None]
    if len(found) < len(of_completions):
        raise ValueError("the engine returned a completion without the experts that its tokens went to")
    dtype = tensor_pb2.DTYPE_UINT8 if found[0].dtype == np.uint8 else tensor_pb2.DTYPE_INT32
    sizes = [prompt.size for prompt in prompts]
    of_prompts: dict[bytes, np.ndarray] = {}
    for prompt, experts in zip(prompts, found, strict=True):
        of_prompts.setdefault(prompt.tobytes(), experts[: prompt.size])
    tensors.prompt_routed_experts.CopyFrom(encode(np.concatenate(list(of_prompts.values()))))
    rows = [experts[size:].reshape(-1) for experts, size in zip(found, sizes, strict=True)]
    tensors.completion_routed_experts.CopyFrom(encode_ragged(rows, dtype))


def group_header(lease: broker_pb2.PromptLease, completions: Sequence[EngineCompletion]) -> experience_pb2.GroupHeader:
    """Return a group's header, without scores; policy versions are -1 if no token was generated."""
    versions = versions_of(completions)
    return experience_pb2.GroupHeader(
        instance_id=lease.instance.instance_id,
        purpose=lease.instance.purpose,
        min_policy_version=min(versions, default=UNKNOWN_VERSION),
        max_policy_version=max(versions, default=UNKNOWN_VERSION),
        completions=len(completions),
        completion_tokens=sum(one.token_ids.size for one in completions),
        attempt=lease.attempt,
        source=lease.instance.source,
    )
