"""A whole training, with a broker over a real socket and a learner that only counts."""

import json
import logging

import grpc
import pytest
from fake_broker import FakeBroker
from quartet.v1 import broker_pb2
from receiver import Receivers
from training import Train, live_until

from quartet_common.ledger import ledger_digest, read_ledger
from quartet_trainer import session
from quartet_trainer.checkpoints import find_checkpoints
from quartet_trainer.errors import TrainingError

pytestmark = pytest.mark.timeout(180)


def test_a_run_without_rollouts_is_trained_committed_exported_and_finished(train: Train, broker: FakeBroker):
    training = train("trainer.checkpoint.interval=2").start()
    assert training.join() == "all steps are done"
    assert broker.trained == [0, 1, 2] and broker.committed == [2, 3]
    assert [(end.state, end.reason) for end in broker.finished] == [
        (broker_pb2.RUN_STATE_SUCCEEDED, "all steps are done: 3 steps trained")
    ]
    assert training.learner.exported == training.folder / "model"
    assert [event.step.policy_version for event in broker.events if event.HasField("step")] == [1, 2, 3]
    assert [event.checkpoint.step for event in broker.events if event.HasField("checkpoint")] == [2, 3]
    lines = training.lines()
    assert [(line["kind"], line["step"], line["policy_version"]) for line in lines] == [
        ("step", 0, 1), ("step", 1, 2), ("step", 2, 3),
    ]  # fmt: skip
    expected = {"staleness/mean": 1.0, "staleness/max": 1.0, "reward/mean": 0.5, "train/loss": 0.5}
    assert {name: lines[-1][name] for name in expected} == expected and lines[-1]["time/step"] > 0
    (logged,) = (json.loads(line) for line in (training.folder / "rollouts.jsonl").read_text().splitlines())
    assert logged["train_step"] == 0 and all("2+3=?" in text for text in logged["rollout"])
    assert sorted(path.name for path in (training.folder / "samples").iterdir()) == ["step-000000.md", "step-000002.md"]
    sample = (training.folder / "samples" / "step-000002.md").read_text()
    assert "2+3=?" in sample and "Reference gt_answer: `8`" in sample and "reward 1, correct" in sample


def names_of(step: int) -> list[str]:
    return [f"pass-0/{2 * step}", f"pass-0/{2 * step + 1}"]


def test_a_later_life_goes_on_from_the_checkpoint_and_cuts_off_what_a_lost_one_wrote(train: Train, broker: FakeBroker):
    first = live_until(train, broker, 2)
    with (first.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "step", "step": 2, "policy_version": 3, "lost": 1.0}) + "\n")
        file.write('{"kind": "step", "st')
    with (first.folder / "checkpoints" / "ledger.jsonl").open("a") as file:
        file.write('{"step":2,"instances":["lost"]}\n{"step":3,"inst')
    second = train().start()
    second.join()
    assert [opened.checkpoint_step for opened in broker.opened] == [0, 2]
    assert broker.trained == [0, 1, 2]
    assert [(line["step"], "lost" in line) for line in second.lines()] == [(0, False), (1, False), (2, False)]
    root = second.folder / "checkpoints"
    newest = find_checkpoints(root)[-1].manifest
    assert read_ledger(root / "ledger.jsonl", newest["ledger"]) == [(step, names_of(step)) for step in range(3)]


def test_a_step_that_ends_after_the_broker_is_in_the_ledger_of_the_checkpoint_saved_then(
    train: Train, broker: FakeBroker
):
    first = train()
    go_on = first.start_held(0)
    broker.change(away=True)
    first.control.stop()
    go_on.set()
    assert first.join() == "the trainer was asked to stop" and broker.trained == []
    broker.change(away=False, settle_from=0)
    assert train().start().join() == "all steps are done"
    assert broker.settled == [(0, names_of(0))] and broker.trained == [1, 2]


def test_a_run_that_a_stopped_trainer_could_not_finish_is_finished_by_the_next(
    train: Train, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(session, "LONGEST_PAUSE_SECONDS", 0.1)
    first = train()
    go_on = first.start_held(3, at="before_write")
    broker.change(away=True)
    first.control.stop()
    go_on.set()
    assert first.join() == "the trainer was asked to stop" and not broker.finished
    broker.change(away=False)
    assert train().start().join() == "all steps are done" and len(broker.finished) == 1


def test_checkpoints_that_are_not_the_runs_own_are_refused(train: Train, broker: FakeBroker):
    first = train().start()
    first.join()
    broker.run.state = broker_pb2.RUN_STATE_ACTIVE
    path = first.folder / "checkpoints" / "ledger.jsonl"
    path.write_text(path.read_text().replace("pass-0/3", "pass-0/9"))
    with pytest.raises(TrainingError, match="checkpoint and its ledger do not belong together: .* have the checksum"):
        train().start().join()
    broker.run.created_at.FromSeconds(1_800_000_000)
    with pytest.raises(TrainingError, match="are of run 'test' created at 2023"):
        train().start().join()
    assert len(broker.opened) == 1, "no session was opened"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"away": True}, r"retried for \d+ s \(trainer.broker_timeout_seconds is 1\)"),
        ({"away": True, "away_as": grpc.StatusCode.RESOURCE_EXHAUSTED}, r"RESOURCE_EXHAUSTED: .*; retried for \d+ s"),
        ({"session_epoch": 2}, "the broker refuses LeaseExperience of step 1: .* fenced by session 2"),
    ],
)
def test_a_broker_that_stays_away_or_follows_another_ends_the_training(
    train: Train, broker: FakeBroker, change: dict, sentence: str
):
    broker.change(batches_allowed=1)
    training = train("trainer.broker_timeout_seconds=1").start()
    broker.wait_until(lambda: broker.trained == [0])
    broker.change(**change)
    with pytest.raises(TrainingError, match=sentence):
        training.join()


def test_evaluations_happen_before_between_and_after_and_stand_once_also_where_a_restart_repeats_one(
    train: Train, broker: FakeBroker
):
    gone = "trainer.early_stop.metric=eval/heldout/pass@7"
    settings = ('trainer.evaluation.sets=["heldout"]', "trainer.evaluation.interval=2", gone)
    broker.change(batches_allowed=2)
    first = train(*settings).start()
    broker.wait_until(lambda: any(event.evaluation.policy_version == 2 for event in broker.events))
    first.control.stop()
    first.join()
    broker.change(batches_allowed=10**9)
    training = train(*settings).start()
    training.join()
    assert broker.evaluations == [("heldout", version) for version in (0, 2, 2, 3)]
    evaluations = [line for line in training.lines() if line["kind"] == "evaluation"]
    assert [line["policy_version"] for line in evaluations] == [0, 2, 3]
    assert evaluations[0]["eval/heldout/ans_acc"] == 0.5 and evaluations[0]["eval/heldout/pass@1"] == 0.5
    records = [json.loads(line) for line in (training.folder / "evaluations" / "heldout-step-2.jsonl").open()]
    assert [record["gold"] for record in records] == ["8", "8"]
    assert {"prompt", "prediction", "parsed", "format_valid", "ans_valid", "response_length", "reward"} <= set(
        records[0]
    )
    assert [e.evaluation.policy_version for e in broker.events if e.HasField("evaluation")] == [0, 2, 2, 3]
    lacks = "trainer.early_stop.metric: the evaluation has no eval/heldout/pass@7; it has eval/heldout/prompts, "
    assert sum(event.notice.text.startswith(lacks) for event in broker.events) == 4


@pytest.mark.parametrize(("trouble", "lacks"), [("large", 0), ("deleted", 1), ("large, deleted", 2)])
def test_an_evaluation_has_a_result_if_all_its_transcripts_are_there(train: Train, broker: FakeBroker, trouble, lacks):
    broker.change(evaluation_trouble=trouble)
    training = train('trainer.evaluation.sets=["heldout"]').start()
    assert training.join() == "all steps are done"
    why = f"the transcripts of {lacks} cannot be read"
    assert any(why in event.notice.text for event in broker.events) == bool(lacks)
    assert any(line.get("eval/heldout/ans_acc") == 0.5 for line in training.lines()) == (not lacks)


def test_no_newer_version_is_published_during_an_evaluation(train: Train, broker: FakeBroker, receiver: Receivers):
    one = receiver("one")
    broker.add_member(one.member)
    broker.evaluation_complete.clear()

    def sent_to() -> list[int]:
        return [event.weights.rollouts for event in broker.events if event.HasField("weights")]

    training = train('trainer.evaluation.sets=["heldout"]', "trainer.evaluation.interval=1").start()
    broker.wait_until(lambda: broker.evaluations == [("heldout", 0)] and sent_to() == [1])
    late = receiver("late")
    broker.add_member(late.member)
    broker.wait_until(lambda: sent_to() == [1, 2])
    assert late.installed(0) is not None, "a late rollout helps in the evaluation, with the version it is about"
    assert broker.trained == [] and one.installed(1) is None
    assert training.control.request_checkpoint().result(30).step == 0, "requests are answered meanwhile"
    broker.evaluation_complete.set()
    assert training.join() == "all steps are done"
    assert [one.installed(v) is not None for v in range(4)] == [True] * 4
    assert late.installed(3) == one.installed(3)


# --- A broker whose books end before the checkpoint -------------------------------------------------------------------


@pytest.fixture
def behind(train: Train, broker: FakeBroker) -> Train:
    """A trainer with a checkpoint of 2 steps; the broker's books end at step 1."""
    live_until(train, broker, 2)
    broker.change(settle_from=1, ledger_digest=ledger_digest([names_of(0)]))
    broker.run.policy_version = broker.run.committed_step = 1
    return train


def test_the_ledgers_lines_are_settled_before_the_first_batch(behind: Train, broker: FakeBroker, caplog):
    caplog.set_level(logging.WARNING)
    behind("trainer.checkpoint.interval=1").start().join()
    assert broker.settled == [(1, names_of(1))] and broker.trained == [0, 1, 2]
    assert broker.opened[-1].settles_ledger and broker.opened[-1].checkpoint_step == 2
    assert "books at step 1, checkpoint at step 2" in caplog.text


def test_a_broker_that_takes_no_ledger_is_refused_where_its_books_lack_steps(behind: Train, broker: FakeBroker):
    broker.change(settle_from=None)
    with pytest.raises(TrainingError, match="takes no ledger: groups of the steps 1 to 1 would be trained again"):
        behind().start().join()
    assert broker.trained == [0, 1]


def test_books_of_another_history_are_refused(behind: Train, broker: FakeBroker):
    broker.change(ledger_digest=ledger_digest([names_of(7)]))
    with pytest.raises(TrainingError, match="books at step 1, checkpoint at step 2: .* different histories"):
        behind().start().join()
    assert not broker.settled and broker.trained == [0, 1]
