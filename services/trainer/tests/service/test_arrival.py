"""What arrives at the trainer: invalid groups are dropped, each by itself; the order of the others changes nothing."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_broker import FakeBroker, make_group
from prometheus_client import REGISTRY
from quartet.v1 import broker_pb2, common_pb2, experience_pb2
from test_loop import names_of
from training import Train, Training

from quartet_common.tensors import encode
from quartet_trainer import training_run
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


def in_a_row(rollout: str) -> float:
    return metric("quartet_trainer_invalid_groups_in_a_row", rollout)


@pytest.mark.parametrize(
    ("parts", "reason", "granted_before"),
    [
        ({"tensors": b"garbage"}, "Error parsing message", False),
        ({"tensors": make_group("x", 0).tensors[:-7]}, "Error parsing message", False),
        ({"tensors": b""}, "prompt_token_ids is unspecified; the contract says int32", False),
        ({}, "rewards has values that are not finite", False),
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


def test_what_only_people_read_may_be_left_out_and_has_outcomes_of_later_releases(train: Train, broker: FakeBroker):
    later = make_group("pass-0/1", 0)
    transcript = experience_pb2.GroupTranscript.FromString(later.transcript)
    transcript.completions[0].score.outcome = 1000
    later.transcript = transcript.SerializeToString()
    broker.change(contents={"pass-0/0": invalid("pass-0/0", transcript=b""), "pass-0/1": later})
    training = train("trainer.samples_interval=1").start()
    assert training.join() == "all steps are done" and broker.dropped == []
    assert "reward 0, 1000" in (training.folder / "samples" / "step-000000.md").read_text()


def test_invalid_groups_in_a_row_are_counted_by_rollout(train: Train, broker: FakeBroker, caplog):
    """A valid one of another rollout, and one of the same that came before them, end no row."""
    bad = [f"bad-{n}" for n in range(12)]
    broker.change(
        contents={name: invalid(name) for name in bad},
        rollouts={**dict.fromkeys([*bad, "pass-0/1"], "broken"), "good": "sound"},
        batches={0: ["pass-0/1", bad[0]]},
        spare=[*bad[1:], "good"],
        batches_allowed=1,
    )
    training = train().start()
    broker.wait_until(lambda: broker.trained == [0])
    assert in_a_row("broken") == 12 and in_a_row("sound") == 0
    assert broker.dropped == bad and broker.batches[0] == ["pass-0/1", "good"]
    assert caplog.text.count("cannot be trained and is dropped") == 1, "the others are shown once a minute"
    broker.change(rollouts={"pass-0/2": "broken"}, batches_allowed=2)
    broker.wait_until(lambda: broker.trained == [0, 1])
    assert in_a_row("broken") == 0 and metric("quartet_trainer_invalid_groups_total", "broken") == 12
    training.control.stop()
    training.join()


def test_metrics_of_a_rollout_that_has_left_are_removed(train: Train, broker: FakeBroker, caplog):
    caplog.set_level(logging.INFO)
    for name in ("leaving", "staying"):
        kind, state = common_pb2.SERVICE_KIND_ROLLOUT, broker_pb2.MEMBER_STATE_JOINING
        broker.add_member(broker_pb2.Member(instance_id=name, kind=kind, state=state, address="127.0.0.1:1"))
    names = {"pass-0/0": "leaving", "pass-0/2": "staying"}
    broker.change(contents={name: invalid(name) for name in names}, rollouts=names, spare=["x", "y"], batches_allowed=2)
    training = train().start()
    broker.wait_until(lambda: broker.trained == [0, 1])
    assert (in_a_row("leaving"), in_a_row("staying")) == (1, 1)
    broker.remove_member("leaving")
    while "rollout left" not in caplog.text:
        time.sleep(0.01)
    broker.change(batches_allowed=3)
    assert training.join() == "all steps are done"
    for series in ("quartet_trainer_invalid_groups_total", "quartet_trainer_invalid_groups_in_a_row"):
        assert REGISTRY.get_sample_value(series, {"rollout": "leaving"}) is None
        assert REGISTRY.get_sample_value(series, {"rollout": "staying"}) == 1


def test_a_run_none_of_whose_groups_can_be_trained_has_failed_and_says_of_what(train: Train, broker: FakeBroker):
    bad = [f"bad-{n}" for n in range(9)]
    contents = {name: invalid(name) for name in bad}
    # What is valid between them begins the count anew, once: in "pass-0/1" it has been seen before.
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


def test_a_last_batch_that_is_invalid_ends_the_data(train: Train, broker: FakeBroker):
    broker.run.spec.max_steps = 0
    bad = names_of(1)
    broker.change(contents={name: invalid(name) for name in bad}, batches_allowed=2, end_of_data=True)
    assert train().start().join() == "the prompts have ended"
    assert broker.dropped == bad and broker.trained == [0] and broker.committed == [1]


def test_an_evaluation_with_an_unreadable_transcript_is_incomplete(train: Train, broker: FakeBroker, caplog):
    caplog.set_level(logging.WARNING)
    broker.change(transcripts=[b"garbage"])
    training = train("trainer.evaluation.sets=['heldout']").start()
    training.join()
    row = next(line for line in training.lines() if line["kind"] == "evaluation")
    assert row["eval/heldout/dead"] == 1 and "eval/heldout/ans_acc" not in row
    assert "0 were set aside (quartet dead list), the transcripts of 1 cannot be read" in caplog.text


@pytest.fixture
def weights_after(
    broker: FakeBroker, model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, torch.Tensor]]:
    """Train one batch whose groups arrive in this order; return the weights."""

    def run(arrival: list[str], *overrides: str) -> dict[str, torch.Tensor]:
        broker.run.state = broker_pb2.RUN_STATE_ACTIVE
        broker.run.spec.max_steps = 1
        contents = {name: make_group(name, 0, seed=len(name), completions=3) for name in arrival}
        broker.change(batches={0: arrival}, granted=set(), contents=contents)
        folder = tmp_path / "-".join(arrival)
        training = Training(broker, folder, f"model.path={model_path}", "trainer.learning_rate=1e-2", *overrides)
        training.learner = create_learner(training.config.section, model_path, training.config.run)
        monkeypatch.setattr(training_run, "_load", lambda config: training.learner)
        training.start().join()
        return {name: tensor.clone() for name, tensor in training.learner.weights()}

    return run


@pytest.mark.parametrize("override", ["trainer.mini_batches=2", "trainer.epochs=2", "trainer.share_prompts=false"])
def test_the_order_in_which_groups_arrive_changes_no_bit_of_the_weights(weights_after, override: str):
    first = weights_after(["a", "bb", "ccc", "dddd"], override)
    second = weights_after(["ccc", "a", "dddd", "bb"], override)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
