"""What an agent may return, and what of it becomes an EpisodeResult."""

import math

import pytest
from quartet.v1 import environment_pb2

from quartet_environment import Reward, Seat
from quartet_environment.seats import NoReward, read_result


class Scalar:
    """As numpy's and torch's."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


def result(value) -> environment_pb2.EpisodeResult:
    return environment_pb2.EpisodeResult(**read_result(value))


@pytest.mark.parametrize("value, number", [(1, 1.0), (0.25, 0.25), (True, 1.0), (Scalar(0.5), 0.5), (Reward(2), 2.0)])
def test_a_number_is_the_reward_of_the_only_seat(value, number):
    (seat,) = result(value).seats
    assert (seat.name, seat.trainable, list(seat.sessions), list(seat.turns)) == ("", True, [], [])
    assert [(one.name, one.value, one.weight) for one in seat.rewards] == [("reward", number, 1.0)]


def test_rewards_by_name_and_turns_keep_their_weights_and_positions():
    found = result(Reward({"right": 1.0, "short": (0.5, 0.1)}, turns=[0.0, None, 2], notes="n" * 11_000))
    (seat,) = found.seats
    assert [(one.name, one.value, one.weight) for one in seat.rewards] == [("right", 1.0, 1.0), ("short", 0.5, 0.1)]
    assert [(one.turn, one.value) for one in seat.turns] == [(0, 0.0), (2, 2.0)]
    assert len(found.notes) == 10_000
    (by_number,) = result(Reward(1.0, turns={7: -1.0})).seats
    assert [(one.turn, one.value) for one in by_number.turns] == [(7, -1.0)]


def test_seats_are_told_apart_by_their_sessions():
    found = result(Reward(seats=[Seat("a", 1.0), Seat("b", {"won": 0.0}, sessions=["x"]), Seat("c", trainable=False)]))
    assert [(each.name, list(each.sessions), each.trainable) for each in found.seats] == [
        ("a", ["a"], True),
        ("b", ["x"], True),
        ("c", ["c"], False),
    ]
    assert not found.seats[2].rewards


@pytest.mark.parametrize(
    "value, said",
    [
        (None, "returned None (NoneType); allowed: a finite number"),
        (math.nan, "returned nan (float)"),
        (-math.inf, "returned -inf (float)"),
        (1e39, "returned 1e+39 (float)"),
        (10**400, "(int)"),
        ("1.0", "returned '1.0' (str)"),
        (1j, "returned 1j (complex)"),
        (Scalar(math.nan), "(Scalar)"),
        ([1.0], "returned [1.0] (list)"),
        ("x" * 10**7, "returned 10000000 items (str)"),
        (Reward(), "without the value"),
        (Reward(math.nan), "'reward' is nan"),
        (Reward({"a": (1.0, math.inf)}), "weighted by inf"),
        (Reward({}), "is empty"),
        (Reward({1: 1.0}), "1 (int) as a reward"),
        (Reward({str(i): 0.0 for i in range(65)}), "65 rewards; allowed: at most 64"),
        (Reward(1.0, turns=[math.nan]), "turn 0 has nan"),
        (Reward(1.0, turns={-1: 0.0}), "turn -1"),
        (Reward(1.0, turns=5), "`turns` is 5"),
        (Reward(seats=[Seat("a", 1.0), Seat("a", 1.0)]), "names that differ"),
        (Reward(seats=[Seat("a")]), "without the value of seat 'a'"),
        (Reward(seats=[Seat("", 1.0)]), "'' (str) as a Seat's name"),
        (Reward(seats=[1.0]), "1.0 (float) in `seats`"),
        (Reward(1.0, seats=[Seat("a", 1.0)]), "`seats` beside `value`"),
    ],
)
def test_what_is_no_reward_is_named(value, said):
    with pytest.raises(NoReward) as caught:
        read_result(value)
    assert said in str(caught.value)
