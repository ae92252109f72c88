"""Dynamic sampling: who is dropped, how often a batch is topped up, and when a batch stays as it is."""

from typing import Any

import numpy as np
import pytest
from fake_broker import FakeBroker
from pydantic import ValidationError
from quartet.v1 import experience_pb2
from training import Train

from quartet_common.tensors import encode
from quartet_trainer.config import TrainerSection
from quartet_trainer.data import outside_accuracy, without_variance

pytestmark = pytest.mark.timeout(120)

ON = "trainer.dynamic_sampling.enabled=true"


def test_what_teaches_nothing_gives_its_place_to_others(train: Train, broker: FakeBroker):
    broker.change(flat={"pass-0/1", "x"}, spare=["x", "y", "z"])
    training = train(ON).start()
    assert training.join() == "all steps are done"
    assert broker.dropped == ["pass-0/1", "x"] and set(broker.drop_reasons.values()) == {"zero variance"}
    assert broker.batches == {0: ["pass-0/0", "y"], 1: ["pass-0/2", "pass-0/3"], 2: ["pass-0/4", "pass-0/5"]}
    lines = training.lines()
    assert [(line["batch/dropped_groups"], line["batch/refills"]) for line in lines] == [(2, 2), (0, 0), (0, 0)]


def test_after_the_last_refill_the_batch_is_trained_as_it_is(train: Train, broker: FakeBroker):
    broker.change(flat={"pass-0/0", "pass-0/1", *"uvwxyz"}, spare=list("uvwxyz"))
    training = train(ON, "trainer.dynamic_sampling.max_refills=2").start()
    assert training.join() == "all steps are done"
    assert broker.dropped == ["pass-0/0", "pass-0/1", "u", "v"] and broker.batches[0] == ["w", "x"]
    assert training.lines()[0]["batch/refills"] == 2


@pytest.mark.parametrize(
    ("override", "state"),
    [
        ("trainer.algorithm=grpo", {"flat": {"pass-0/0"}}),
        ("trainer.dynamic_sampling.max_refills=0", {"flat": {"pass-0/0"}}),
        (ON, {"flat": {"pass-0/0"}, "granted": {0}}),  # to an earlier process
        (ON, {"flat": {"pass-0/4"}, "batches_allowed": 3, "end_of_data": True}),  # the data's last batch
    ],
)
def test_a_batch_that_stays_as_it_is(train: Train, broker: FakeBroker, override: str, state: dict[str, Any]):
    broker.change(spare=["x"], **state)
    training = train("trainer.algorithm=dapo", override).start()
    training.join()
    assert broker.dropped == [] and broker.trained == [0, 1, 2]
    assert ("batch/refills" in training.lines()[0]) == ("grpo" not in override)


def test_equal_rewards_and_only_they_are_without_variance():
    rewards = {"solved": [1, 1, 1], "failed": [0, 0], "mixed": [0, 1], "nearly": [0.5, 0.5, 0.5001], "single": [0.3]}
    groups = {
        name: experience_pb2.GroupTensors(rewards=encode(np.array(values, np.float32)))
        for name, values in rewards.items()
    }
    assert without_variance(groups, by_turn=False) == ["solved", "failed", "single"]


def test_groups_outside_the_accuracy_are_those_of_judged_answers_of_each_seat():
    """A mean within the bounds, its ends included, keeps a group; so does a seat's own."""

    def group(right: list[float], judged: list[int] | None = None, seats: list[int] | None = None) -> Any:
        tensors = experience_pb2.GroupTensors(ans_acc=encode(np.array(right, np.float32)))
        if judged is not None:
            tensors.ans_judged.CopyFrom(encode(np.array(judged, np.uint8)))
        if seats is not None:
            tensors.seats.CopyFrom(encode(np.array(seats, np.int32)))
        return tensors

    groups = {
        "solved": group([1, 1, 1, 1]),
        "failed": group([0, 0, 0, 0]),
        "mixed": group([1, 0, 0, 0]),
        "at the end": group([1, 1, 1, 0]),
        "hard": group([1] + [0] * 7),
        "solved where judged": group([1, 1, 0, 0], judged=[1, 1, 0, 0]),
        "never judged": group([0, 0], judged=[0, 0]),
        "mixed only over its seats": group([1, 0, 1, 0], seats=[0, 1, 0, 1]),
        "mixed in one seat": group([1, 0, 1, 1], seats=[0, 1, 0, 1]),
    }
    dropped = ["solved", "failed", "hard", "solved where judged", "mixed only over its seats"]
    assert outside_accuracy(groups, (0.25, 0.75)) == dropped


def test_accuracy_gives_its_place_to_others_beside_variance(train: Train, broker: FakeBroker):
    """The fake broker's groups have rewards 0 and 1, and every answer is right or wrong like its reward."""
    broker.change(flat={"pass-0/1"}, spare=list("stuvwxyz"))
    training = train(ON, "trainer.dynamic_sampling.accuracy_range=[0.9, 1.0]", "trainer.dynamic_sampling.max_refills=1")
    assert training.start().join() == "all steps are done"
    assert broker.drop_reasons["pass-0/1"] == "zero variance" and "pass-0/1" not in broker.batches[0]
    others = {name: reason for name, reason in broker.drop_reasons.items() if name != "pass-0/1"}
    assert others and set(others.values()) == {"accuracy out of range"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"enabled": True, "accuracy_range": [0.9, 0.1]}, "two numbers from 0 to 1, the smaller first"),
        ({"accuracy_range": [0.01, 0.99]}, "accuracy_range: no group is replaced; set dynamic_sampling.enabled = true"),
    ],
)
def test_accuracy_ranges_that_cannot_be_are_refused(value: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=message):
        TrainerSection(dynamic_sampling=value)
