"""Temperatures by policy version: golden numbers, and what reaches the engine and the samples."""

import pytest
from quartet.v1 import experience_pb2
from world import instance

from quartet_common.tensors import decode
from quartet_rollout.generation import PromptRefused, temperature

STEP, LINEAR, COSINE = (
    experience_pb2.TEMPERATURE_CURVE_STEP,
    experience_pb2.TEMPERATURE_CURVE_LINEAR,
    experience_pb2.TEMPERATURE_CURVE_COSINE,
)
POINTS = ((10, 1.2), (20, 0.8), (40, 1.0))


def schedule(curve: int, points=POINTS) -> experience_pb2.TemperatureSchedule:
    made = experience_pb2.TemperatureSchedule(curve=curve)
    for version, value in points:
        made.points.add(policy_version=version, temperature=value)
    return made


@pytest.mark.parametrize(
    ("curve", "by_version"),
    [
        (STEP, {0: 1.2, 10: 1.2, 19: 1.2, 20: 0.8, 39: 0.8, 40: 1.0, 1000: 1.0}),
        (LINEAR, {0: 1.2, 10: 1.2, 11: 1.16, 15: 1.0, 20: 0.8, 30: 0.9, 40: 1.0, 1000: 1.0}),
        # (1 - cos(pi/4)) / 2 = 0.14644661; a quarter of the way from 0.8 to 1.0 is 0.8 + 0.2 * that.
        (COSINE, {0: 1.2, 10: 1.2, 15: 1.0, 20: 0.8, 25: 0.829289322, 30: 0.9, 40: 1.0, 1000: 1.0}),
    ],
)
def test_schedule_draws_equal_golden_numbers(curve, by_version):
    for version, expected in by_version.items():
        assert temperature(schedule(curve), version) == pytest.approx(expected, rel=1e-6), version
        assert temperature(schedule(curve, [(5, 0.7)]), version) == pytest.approx(0.7)


def test_a_curve_of_a_later_release_is_refused():
    with pytest.raises(PromptRefused, match="run.temperature_schedule.curve: got 17; allowed: "):
        temperature(schedule(17), 15)


async def test_each_sample_carries_the_temperature_it_was_drawn_at(world):
    world.engine.policy_version = 15
    world.broker.run.spec.temperature_schedule.CopyFrom(schedule(LINEAR))
    own = instance("own")
    own.prompt.sampling.temperature = 0.3
    evaluated = instance("evaluated", purpose=experience_pb2.PURPOSE_EVALUATE)
    await world.put(instance("scheduled"), own, evaluated)
    await world.load(version=30)
    await world.put(instance("later"))
    drawn = {
        put.group.header.instance_id: decode(world.broker.tensors(i).temperatures).tolist()
        for i, put in enumerate(world.broker.puts)
    }
    assert drawn == {
        "scheduled": pytest.approx([1.0, 1.0]),
        "own": pytest.approx([0.3, 0.3]),
        "evaluated": [1.0],
        "later": pytest.approx([0.9, 0.9]),
    }
    assert sorted(round(request[3].temperature, 6) for request in world.engine.requests) == [0.3, 0.9, 1.0, 1.0]
