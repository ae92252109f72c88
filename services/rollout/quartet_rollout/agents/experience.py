"""The completions of agents in a group's tensors and transcript."""

from collections.abc import Callable, Sequence

import numpy as np
from quartet.v1 import experience_pb2

from quartet_common.tensors import encode
from quartet_rollout.agents.completions import SeatCompletion
from quartet_rollout.engines.base import SamplingSettings
from quartet_rollout.experience import completion_info, group_tensors, put_prompts, put_turns


def agents_info(
    played: SeatCompletion, index: int, prompt_text: str, text: Callable[[np.ndarray], str]
) -> experience_pb2.CompletionInfo:
    """Return an agent's completion for the transcript.

    Args:
        index: its position in the group.
        prompt_text: the group's.
        text: of tokens.
    """
    info = experience_pb2.CompletionInfo(
        index=index,
        finish_reason=f"FINISH_REASON_{played.rows[-1].completion.finish_reason.upper()}",
        episode=played.episode,
        seat=played.seat,
        environment=played.score,
        turn_infos=_turn_infos(played),
    )
    for row in played.rows:
        one = completion_info(row.completion, text(row.completion.token_ids))
        prompt = text(row.prompt_token_ids)
        info.text += f"\n\n[{row.begun}]\n\n{prompt}{one.text}" if row.begun else one.text
        info.rows.add(prompt_text=prompt, text=one.text, tokens=one.tokens, begun=row.begun)
        for span in one.version_spans:
            begin, end = span.begin + info.tokens, span.end + info.tokens
            info.version_spans.add(policy_version=span.policy_version, begin=begin, end=end)
        info.tokens += one.tokens
        info.turns += one.turns
        info.inserted_tokens += one.inserted_tokens
    if len(info.rows) == 1 and info.rows[0].prompt_text == prompt_text:
        info.ClearField("rows")
    return info


def _turn_infos(played: SeatCompletion) -> list[experience_pb2.TurnInfo]:
    """Return the turns in the order of time."""
    infos = {
        turn: experience_pb2.TurnInfo(row=number, end=end, reward=played.turn_rewards.get(turn))
        for number, row in enumerate(played.rows)
        for turn, end in zip(row.turn_indices, row.completion.turn_ends, strict=True)
    }
    return [infos[turn] for turn in sorted(infos)]


def agents_tensors(completions: Sequence[SeatCompletion], settings: SamplingSettings) -> experience_pb2.GroupTensors:
    """Return the tensors of a group of agents, without scores."""
    rows = [row for one in completions for row in one.rows]
    prompts = [row.prompt_token_ids for row in rows]
    seats = list(dict.fromkeys(one.seat for one in completions))
    tensors = group_tensors(prompts, [row.completion for row in rows], settings)
    if len(rows) > len(completions) or len(seats) > 1:
        put_prompts(tensors, prompts, always=True)
    if tensors.HasField("prompts"):
        of_row = [number for number, one in enumerate(completions) for _ in one.rows]
        tensors.row_completions.CopyFrom(encode(np.asarray(of_row, np.int32)))
        tensors.seats.CopyFrom(encode(np.asarray([seats.index(one.seat) for one in completions], np.int32)))
    tensors.sampling.n = len(completions)
    rewards = [[one.turn_rewards.get(turn) for turn in row.turn_indices] for one in completions for row in one.rows]
    put_turns(tensors, [row.completion for row in rows], [row.turn_indices for row in rows], rewards)
    tensors.outcome_rewards.CopyFrom(encode(np.asarray([one.outcome for one in completions], np.float32)))
    return tensors
