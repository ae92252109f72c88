"""What arrives at the trainer: invalid groups are dropped, each by itself; the order of the others changes nothing."""

import threading
from pathlib import Path

import numpy as np
import pytest
from fake_broker import FakeBroker, make_group
from learner_helpers import assert_near
from prometheus_client import REGISTRY
from quartet.v1 import broker_pb2, common_pb2, experience_pb2
from training import Train, Training

from quartet_common.tensors import encode
from quartet_trainer import members, training_run
from quartet_trainer.learner import create_learner

pytestmark = pytest.mark.timeout(120)


def invalid(name: str, **parts: bytes) -> experience_pb2.ExperienceGroup:
    """A group whose tensors, transcript or, by default, one reward cannot be used."""
    group = make_group(name, 0)
    if not parts:
        tensors = experience_pb2.GroupTensors.FromString(group.tensors)
        tensors.rewards.CopyFrom(encode(np.array([1, np.nan, 0, 1], np.float32)))
        parts = {"tensors": tensors.SerializeToString()}
    for part, data in parts.items():
        setattr(group, part, data)
    return group


def metric(name: str, rollout: str) -> float:
    return REGISTRY.get_sample_value(name, {"rollout": rollout}) or 0.0


@pytest.mark.parametrize(
    ("parts", "reason", "granted_before"),
    [
        ({"tensors": b"garbage"}, "Error parsing message", False),
        ({"transcript": b"garbage"}, "Error parsing message", False),
        ({}, "rewards has values that are not finite", True),
    ],
)
def test_an_invalid_group_gives_its_place_to_another(
    train: Train,
    broker: FakeBroker,
    caplog,
    parts: dict[str, bytes],
    reason: str,
    granted_before: bool,
):
    """Also of a batch that an earlier process was granted: that one ended by it, so it is in no weights."""
    broker.change(
        contents={"pass-0/1": invalid("pass-0/1", **parts)},
        rollouts={"pass-0/1": "host-7"},
        spare=["x"],
        granted={0} if granted_before else set(),
    )
    before = metric("quartet_trainer_invalid_groups_total", "host-7")
    training = train().start()
    assert training.join() == "all steps are done"
    assert broker.dropped == ["pass-0/1"] and broker.batches[0] == ["pass-0/0", "x"]
    assert broker.drop_reasons["pass-0/1"].startswith(f"invalid group of host-7: {reason}")
    assert metric("quartet_trainer_invalid_groups_total", "host-7") == before + 1
    said = f"group 'pass-0/1' of rollout 'host-7' cannot be trained and is dropped: {reason}"
    assert said in caplog.text
    assert any(event.notice.text.startswith(said) for event in broker.events)


def test_a_run_none_of_whose_groups_can_be_trained_has_failed_and_says_of_what(train: Train, broker: FakeBroker):
    bad = [f"bad-{n}" for n in range(9)]
    contents = {name: invalid(name) for name in bad}
    # What is valid between them restarts the count, once: in "pass-0/1" it has been seen before.
    broker.change(
        contents=contents, batches={0: ["pass-0/0", *bad[:1]], 1: ["pass-0/1", bad[1]]}, spare=["x", *bad[2:]]
    )
    training = train("trainer.max_invalid_groups=5").start()
    assert training.join() == "no group can be trained"
    assert broker.trained == [0] and broker.dropped == bad[:6] and broker.committed == [1]
    (finished,) = broker.finished
    assert (finished.state, finished.ending) == (broker_pb2.RUN_STATE_FAILED, broker_pb2.RUN_ENDING_INVALID_GROUPS)
    assert finished.reason.startswith(
        "no group can be trained: 1 steps trained; the last 5 groups cannot be trained (trainer.max_invalid_groups); "
        "the last of them, of rollout 'rollout-1': rewards has values that are not finite"
    )


def test_metrics_of_a_rollout_that_has_left_are_removed(train: Train, broker: FakeBroker, monkeypatch):
    left = threading.Event()
    monkeypatch.setattr(members.log, "info", lambda text, **_: left.set() if text == "rollout left" else None)
    for name in ("leaving", "staying"):
        kind, state = common_pb2.SERVICE_KIND_ROLLOUT, broker_pb2.MEMBER_STATE_JOINING
        broker.add_member(broker_pb2.Member(instance_id=name, kind=kind, state=state, address="127.0.0.1:1"))
    names = {"pass-0/0": "leaving", "pass-0/2": "staying"}
    broker.change(contents={name: invalid(name) for name in names}, rollouts=names, spare=["x", "y"], batches_allowed=2)
    training = train().start()
    broker.wait_until(lambda: broker.trained == [0, 1])
    assert [metric("quartet_trainer_invalid_groups_in_a_row", name) for name in names.values()] == [1, 1]
    broker.remove_member("leaving")
    assert left.wait(60)
    broker.change(batches_allowed=3)
    assert training.join() == "all steps are done"
    for series in ("quartet_trainer_invalid_groups_total", "quartet_trainer_invalid_groups_in_a_row"):
        assert REGISTRY.get_sample_value(series, {"rollout": "leaving"}) is None
        assert REGISTRY.get_sample_value(series, {"rollout": "staying"}) == 1


@pytest.mark.parametrize("override", ["trainer.mini_batches=2", "trainer.share_prompts=false"])
def test_the_order_in_which_groups_arrive_changes_no_bit_of_the_weights(
    broker: FakeBroker, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str
):
    broker.run.spec.max_steps = 1
    found = []
    for arrival in (["a", "bb", "ccc", "dddd"], ["ccc", "a", "dddd", "bb"]):
        broker.run.state = broker_pb2.RUN_STATE_ACTIVE
        contents = {name: make_group(name, 0, seed=len(name), completions=3) for name in arrival}
        broker.change(batches={0: arrival}, granted=set(), contents=contents)
        folder = tmp_path / "-".join(arrival)
        training = Training(broker, folder, f"model.path={model_path}", "trainer.learning_rate=1e-2", override)
        learner = create_learner(training.config.section, model_path, training.config.run)
        monkeypatch.setattr(training_run, "load_learner", lambda config, learner=learner: learner)
        training.start().join()
        found.append({name: tensor.clone() for name, tensor in learner.weights()})
    assert_near(*found, rtol=0, atol=0)
