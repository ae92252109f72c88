"""Reads what an agent returned: the rewards of an episode's seats, as EpisodeResult has them."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from quartet_common.text import encodable
from quartet_common.values import LARGEST_FLOAT32
from quartet_environment.agent import Reward, Seat, Turns, Value

_RETURNS = "a finite number, or quartet_environment.Reward"
_NUMBER = "a finite number that float32 can hold"
# Together below worker_protocol.LONGEST_LINE, whatever characters the names have.
_MOST_SEATS, _MOST_REWARDS, _MOST_SESSIONS, _MOST_TURNS = 16, 64, 64, 1024
_LONGEST_NAME, _LONGEST_NOTES = 256, 10_000


class NoReward(Exception):
    """What the agent returned is no reward; says what came and what is allowed."""


def read_result(value: Any) -> dict[str, Any]:
    """Return the fields of EpisodeResult. Raises NoReward."""
    reward = value if isinstance(value, Reward) else Reward(_number(value, "returned", _RETURNS))
    if reward.seats and (reward.value is not None or reward.turns):
        raise NoReward("returned a Reward with `seats` beside `value` or `turns`; allowed: the seats' own alone")
    seats = list(_each(reward.seats, "seats", _MOST_SEATS)) or [Seat("", reward.value, reward.turns)]
    names = [_name(seat.name, "a Seat's name", bool(reward.seats)) for seat in seats if _is_seat(seat)]
    if len(set(names)) < len(names):
        raise NoReward(f"returned seats named {', '.join(names)}; allowed: names that differ")
    notes = reward.notes if isinstance(reward.notes, str) else repr(reward.notes)
    return {"seats": [_seat(seat, len(seats) > 1) for seat in seats], "notes": encodable(notes, _LONGEST_NOTES)}


def _is_seat(seat: Any) -> bool:
    if not isinstance(seat, Seat):
        raise NoReward(f"returned a Reward with {_shown(seat)} in `seats`; allowed: quartet_environment.Seat")
    return True


def _seat(seat: Seat, is_one_of_several: bool) -> dict[str, Any]:
    of = f" of seat '{seat.name}'" if seat.name else ""
    if seat.value is None and seat.trainable:
        raise NoReward(f"returned a Reward without the value{of}; allowed: {_NUMBER}")
    default = [seat.name] if is_one_of_several else []
    sessions = [_name(one, "a session") for one in _each(seat.sessions, "sessions", _MOST_SESSIONS)]
    return {
        "name": seat.name,
        "trainable": bool(seat.trainable),
        "rewards": [] if seat.value is None else list(_rewards(seat.value, of)),
        "sessions": sessions or default,
        "turns": list(_turns(seat.turns, of)),
    }


def _rewards(value: Value, of: str) -> Iterator[dict[str, Any]]:
    named = value if isinstance(value, Mapping) else {"reward": value}
    if not named:
        raise NoReward(f"returned a Reward whose value{of} is empty; allowed: one reward at least")
    for name, given in zip(named, _each(named.values(), "rewards", _MOST_REWARDS), strict=True):
        what = f"returned a Reward whose '{_name(name, 'a reward')}'{of} is"
        number, weight = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
        yield {"name": name, "value": _number(number, what), "weight": _number(weight, f"{what} weighted by")}


def _turns(turns: Turns, of: str) -> Iterator[dict[str, Any]]:
    numbered = turns.items() if isinstance(turns, Mapping) else enumerate(_each(turns, "turns", _MOST_TURNS))
    for turn, value in _each(numbered, "turns", _MOST_TURNS):
        if isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn < 2**31:
            raise NoReward(f"returned a Reward with turn {_shown(turn)}{of}; allowed: a whole number from 0")
        if value is not None:
            yield {"turn": turn, "value": _number(value, f"returned a Reward whose turn {turn}{of} has")}


def _each(values: Any, name: str, most: int) -> Any:
    """Return a collection of at most so many. Raises NoReward."""
    if isinstance(values, str) or not hasattr(values, "__iter__") or not hasattr(values, "__len__"):
        if not isinstance(values, enumerate):
            raise NoReward(f"returned a Reward whose `{name}` is {_shown(values)}; allowed: a list")
    elif len(values) > most:
        raise NoReward(f"returned a Reward with {len(values)} {name}; allowed: at most {most}")
    return values


def _name(name: Any, what: str, required: bool = True) -> str:
    if not isinstance(name, str) or not int(required) <= len(name) <= _LONGEST_NAME or encodable(name) != name:
        raise NoReward(f"returned a Reward with {_shown(name)} as {what}; allowed: 1 to {_LONGEST_NAME} characters")
    return name


def _number(value: Any, what: str, allowed: str = _NUMBER) -> float:
    number = value.item() if callable(getattr(value, "item", None)) else value  # of numpy and torch
    if isinstance(number, int | float) and abs(number) <= LARGEST_FLOAT32 and math.isfinite(number):
        return float(number)
    raise NoReward(f"{what} {_shown(value)}; allowed: {allowed}")


def _shown(value: Any) -> str:
    if isinstance(value, str | bytes | list | tuple | dict) and len(value) > 1000:
        return f"{len(value)} items ({type(value).__name__})"
    try:
        text = repr(value)
    except Exception as error:
        text = f"a value whose repr raised {type(error).__name__}"
    return f"{encodable(text, 80)} ({type(value).__name__})"
