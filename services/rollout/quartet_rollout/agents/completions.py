"""What an episode came to: for each trainable seat a completion, with its rows and rewards."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from quartet.v1 import environment_pb2, reward_pb2

from quartet_common.durations import to_duration
from quartet_common.values import LARGEST_FLOAT32
from quartet_rollout.agents.episodes import AgentEpisode, Call
from quartet_rollout.agents.rows import Row, rows_of
from quartet_rollout.environments.base import EnvironmentFailed

_LONGEST_REASON = 1000


@dataclass(frozen=True)
class SeatCompletion:
    """What the agent of one seat sampled in an episode, and what the environment says that it is worth."""

    episode: int
    """Position of the episode in its group."""
    seat: str
    """Name of the seat; "" of the only agent."""
    rows: list[Row]
    turn_rewards: dict[int, float]
    """Rewards of turns by their positions among the seat's calls."""
    outcome: float
    """Its reward without those of turns."""
    score: reward_pb2.Score

    @property
    def last_turn(self) -> np.ndarray:
        """Tokens of its last call, int32."""
        row = max(self.rows, key=lambda row: row.turn_indices[-1]).completion
        return row.token_ids[slice(*row.last_turn)]


def seat_completions(
    episode: AgentEpisode, result: environment_pb2.EpisodeResult, index: int, seconds: float
) -> list[SeatCompletion]:
    """Return a completion for each trainable seat. Raises EnvironmentFailed for an episode not to be trained on."""
    if episode.trouble:
        raise EnvironmentFailed(f"episode {index}: {episode.trouble}")
    try:
        trained = _trained(episode.calls, result)
        if silent := [seat.name for seat, calls in trained if not calls]:  # by chance, or because another one failed
            raise EnvironmentFailed(
                f"episode {index}: seat '{silent[0]}' made no call to the endpoint; a trainable seat makes one at least"
            )
        return [
            SeatCompletion(
                index,
                seat.name if len(result.seats) > 1 else "",
                rows_of(calls),
                _turn_rewards(seat, len(calls)),
                *_score(seat, result.notes, seconds),
            )
            for seat, calls in trained
        ]
    except ValueError as error:
        raise EnvironmentFailed(f"episode {index}: {error}", permanent=True) from error


def _trained(
    calls: Sequence[Call], result: environment_pb2.EpisodeResult
) -> list[tuple[environment_pb2.SeatResult, list[Call]]]:
    """Return the trainable seats with their calls. Raises ValueError."""
    seats = result.seats
    if not any(seat.trainable for seat in seats):
        raise ValueError("it has no trainable seat; allowed: one at least")
    if not calls:
        raise ValueError("its agent made no call to the endpoint, so there is nothing to train on")
    owner: dict[str, int] = {}
    for number, seat in enumerate(seats):
        if not seat.sessions and len(seats) > 1:
            raise ValueError(f"seat '{seat.name}' has no session; with several seats each needs its own")
        for session in seat.sessions:
            if owner.setdefault(session, number) != number:
                raise ValueError(f"session '{session}' is of two seats; allowed: one")
    if owner and (unknown := {call.session for call in calls} - owner.keys()):
        raise ValueError(
            f"calls with the header X-Session-ID {sorted(unknown)} are of no seat; its seats have {sorted(owner)}"
        )
    return [
        (seat, [call for call in calls if not owner or owner[call.session] == number])
        for number, seat in enumerate(seats)
        if seat.trainable
    ]


def _turn_rewards(seat: environment_pb2.SeatResult, turns: int) -> dict[int, float]:
    rewards = {one.turn: one.value for one in seat.turns}
    if len(rewards) < len(seat.turns):
        raise ValueError("a turn has two rewards; allowed: one")
    if wrong := [turn for turn in rewards if not 0 <= turn < turns]:
        raise ValueError(f"turn {wrong[0]} has a reward; its turns are 0 to {turns - 1}, its calls to the endpoint")
    return rewards


def _score(seat: environment_pb2.SeatResult, notes: str, seconds: float) -> tuple[float, reward_pb2.Score]:
    """Return the weighted sum of the rewards, and a score that includes those of turns. Raises ValueError."""
    if not seat.rewards:
        raise ValueError("it was finished without a reward")
    score = reward_pb2.Score(outcome=reward_pb2.OUTCOME_UNJUDGED, unjudged=True, reason=notes[:_LONGEST_REASON])
    parts = [(one.name, one.value, one.weight if one.HasField("weight") else 1.0) for one in seat.rewards]
    outcome = sum(weight * value for _, value, weight in parts)
    if seat.turns:
        parts.append(("turns", sum(one.value for one in seat.turns), 1.0))
    for name, value, weight in parts:
        score.verifiers.add(name=name, reward=value, weight=weight, outcome=reward_pb2.OUTCOME_UNJUDGED)
        score.reward += weight * value
        for number in (value, weight, score.reward):
            if not abs(number) <= LARGEST_FLOAT32:
                raise ValueError(f"its reward '{name}' is {value:g} with weight {weight:g}; allowed: finite numbers")
    score.elapsed.CopyFrom(to_duration(seconds))
    return outcome, score
