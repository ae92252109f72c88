"""A whole training, with a broker over a real socket and a learner that only counts."""

import json
import time
from pathlib import Path

import pytest
from fake_broker import FakeBroker
from quartet.v1 import broker_pb2, experience_pb2
from receiver import Receivers
from training import Train, Training, live_until

from quartet_common.ledger import read_ledger
from quartet_trainer.checkpoints import find_checkpoints
from quartet_trainer.errors import TrainingError

pytestmark = pytest.mark.timeout(180)


def test_a_run_without_rollouts_is_trained_committed_exported_and_finished(train: Train, broker: FakeBroker):
    training = train("trainer.checkpoint.interval=2").start()
    assert training.join() == "all steps are done"
    assert broker.trained == [0, 1, 2]
    assert broker.committed == [2, 3]
    assert [(end.state, end.reason) for end in broker.finished] == [
        (broker_pb2.RUN_STATE_SUCCEEDED, "all steps are done: 3 steps trained")
    ]
    assert training.learner.exported == training.folder / "model"
    assert [event.step.policy_version for event in broker.events if event.HasField("step")] == [1, 2, 3]
    assert [event.checkpoint.step for event in broker.events if event.HasField("checkpoint")] == [2, 3]


def test_every_step_leaves_metrics_and_some_a_sample(train: Train, broker: FakeBroker):
    training = train().start()
    training.join()
    lines = training.lines()
    assert [(line["kind"], line["step"], line["policy_version"]) for line in lines] == [
        ("step", 0, 1),
        ("step", 1, 2),
        ("step", 2, 3),
    ]
    last = lines[-1]
    assert last["staleness/mean"] == 1.0 and last["staleness/max"] == 1.0
    assert last["reward/mean"] == 0.5 and last["train/loss"] == 0.5
    assert last["batch/completions"] == 8.0
    assert last["time/step"] > 0 and 0 <= last["time/idle_fraction"] <= 1
    assert sorted(path.name for path in (training.folder / "samples").iterdir()) == ["step-000000.md", "step-000002.md"]
    (logged,) = (json.loads(line) for line in (training.folder / "rollouts.jsonl").read_text().splitlines())
    assert logged["train_step"] == 0 and all("2+3=?" in text for text in logged["rollout"])
    sample = (training.folder / "samples" / "step-000002.md").read_text()
    assert "2+3=?" in sample and "Reference answer: `8`" in sample and "reward 1, correct" in sample


def _dead(reason: str, purpose: int = experience_pb2.PURPOSE_TRAIN) -> broker_pb2.DeadPrompt:
    return broker_pb2.DeadPrompt(instance=experience_pb2.PromptInstance(purpose=purpose), reasons=["first", reason])


def test_a_run_that_trained_nothing_has_failed_by_the_most_common_reason(train: Train, broker: FakeBroker):
    evaluated = [_dead("not counted", experience_pb2.PURPOSE_EVALUATE)] * 9
    broker.dead = [_dead("another"), _dead("line 1: too long"), _dead("line 2: too long"), *evaluated]
    broker.run.stats.dead_training, broker.run.stats.dropped = 3, 1
    broker.change(batches_allowed=0, end_of_data=True)
    training = train().start()
    assert training.join() == "the prompts have ended"
    (finished,) = broker.finished
    assert (finished.state, finished.ending) == (broker_pb2.RUN_STATE_FAILED, broker_pb2.RUN_ENDING_DATA)
    assert finished.reason == (
        "the prompts have ended: 0 steps trained; 3 of 4 prompts are dead, 2 of 3 of one reason: line 1: too long"
    )
    assert training.learner.exported is None, "what was not trained is no result"


@pytest.mark.parametrize(("dead", "state"), [(4, broker_pb2.RUN_STATE_SUCCEEDED), (5, broker_pb2.RUN_STATE_FAILED)])
def test_a_run_has_failed_if_more_than_half_of_its_prompts_are_dead(train: Train, broker: FakeBroker, dead, state):
    broker.dead = [_dead("no verifier")] * dead
    broker.run.stats.dead_training, broker.run.stats.committed = dead, 4
    training = train().start()
    training.join()
    assert (broker.finished[0].state, broker.finished[0].ending) == (state, broker_pb2.RUN_ENDING_MAX_STEPS)
    assert ("5 of 5 of one reason: no verifier" in broker.finished[0].reason) is (dead == 5)
    assert training.learner.exported, "it was trained all the same"


def test_a_stop_while_waiting_saves_and_commits_what_is_trained(train: Train, broker: FakeBroker):
    broker.change(batches_allowed=1)
    training = train().start()
    broker.wait_until(lambda: broker.trained == [0])
    began = time.monotonic()
    training.control.stop()
    assert training.join() == "the trainer was asked to stop"
    assert time.monotonic() - began < 3, "a stop does not wait for the lease's deadline"
    assert broker.committed == [1] and not broker.finished


def test_a_stop_in_mid_step_lets_the_step_finish(train: Train, broker: FakeBroker):
    training = train()
    go_on = training.start_held(1)
    training.control.stop()
    go_on.set()
    assert training.join() == "the trainer was asked to stop"
    assert broker.trained == [0, 1] and broker.committed == [2]


def ledger_of(training: Training) -> list[tuple[int, list[str]]]:
    """The newest checkpoint's."""
    root = training.folder / "checkpoints"
    newest = find_checkpoints(root)[-1]
    manifest = json.loads((newest.path / "manifest.json").read_text())
    assert (manifest["run_id"], manifest["step"]) == ("test", newest.step)
    return read_ledger(root / "ledger.jsonl", manifest["ledger"])


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
    assert broker.opened[0].checkpoint_step == 0 and not broker.opened[0].consumed_instance_ids
    assert broker.opened[1].checkpoint_step == 2
    # The guard reaches back over the last commit.
    assert list(broker.opened[1].consumed_instance_ids) == names_of(0) + names_of(1)
    assert broker.trained == [0, 1, 2]
    assert [(line["step"], "lost" in line) for line in second.lines()] == [(0, False), (1, False), (2, False)]
    assert ledger_of(second) == [(step, names_of(step)) for step in range(3)]


def test_a_run_without_checkpoints_begins_with_an_empty_ledger(train: Train, tmp_path: Path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "ledger.jsonl").write_text('{"step":0,"instances":["another run\'s"]}\n')
    training = train("trainer.checkpoint.interval=2").start()
    training.join()
    assert ledger_of(training) == [(step, names_of(step)) for step in range(3)]


def test_a_ledger_that_was_changed_is_refused(train: Train, broker: FakeBroker):
    first = train().start()
    first.join()
    path = first.folder / "checkpoints" / "ledger.jsonl"
    path.write_text(path.read_text().replace("pass-0/3", "pass-0/9"))
    broker.run.state = broker_pb2.RUN_STATE_ACTIVE
    with pytest.raises(TrainingError, match="checkpoint and its ledger do not belong together: .* have the checksum"):
        train().start().join()
    assert len(broker.opened) == 1, "no session was opened"


def test_a_refused_start_leaves_the_ledger_as_it_is(train: Train, broker: FakeBroker):
    first = train().start()
    first.join()
    path = first.folder / "checkpoints" / "ledger.jsonl"
    written = path.read_bytes()
    (newest,) = find_checkpoints(path.parent)
    newest.path.rename(first.folder / "elsewhere")
    broker.run.state, broker.run.committed_step = broker_pb2.RUN_STATE_ACTIVE, 3
    with pytest.raises(
        TrainingError, match="has 3 committed steps, but the newest .* has 0.*bring that checkpoint back"
    ):
        train().start().join()
    assert path.read_bytes() == written


def test_a_ledger_that_cannot_be_written_ends_the_training_with_a_sentence(train: Train, tmp_path: Path):
    (tmp_path / "run" / "checkpoints" / "ledger.jsonl").mkdir(parents=True)
    with pytest.raises(TrainingError, match=r"cannot write the ledger '.*ledger\.jsonl': .*[Dd]irectory"):
        train().start().join()


def test_checkpoints_of_another_run_are_refused(train: Train, broker: FakeBroker):
    first = train("trainer.checkpoint.interval=1").start()
    first.join()
    broker.run.created_at.FromSeconds(1_800_000_000)
    broker.run.state = broker_pb2.RUN_STATE_ACTIVE
    with pytest.raises(TrainingError, match="are of run 'test' created at 2023"):
        train().start().join()
    assert len(broker.opened) == 1, "no session was opened"


def test_a_broker_that_goes_away_is_waited_for(train: Train, broker: FakeBroker):
    broker.change(batches_allowed=1)
    training = train().start()
    broker.wait_until(lambda: broker.trained == [0])
    broker.change(away=True)
    deadline = time.monotonic() + 20
    # Besides a rollout, of which there is none here.
    while f"broker at {broker.address}" not in training.status.waits and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(training.status.waits) == {f"broker at {broker.address}", "a rollout to join the run"}
    broker.change(away=False, batches_allowed=10**9)
    assert training.join() == "all steps are done"
    assert broker.trained == [0, 1, 2]


def test_a_broker_that_stays_away_ends_the_training(train: Train, broker: FakeBroker):
    broker.change(batches_allowed=1)
    training = train("trainer.broker_timeout_seconds=1").start()
    broker.wait_until(lambda: broker.trained == [0])
    broker.change(away=True)
    with pytest.raises(TrainingError, match=r"away for \d+ s \(trainer.broker_timeout_seconds is 1\)"):
        training.join()


def test_a_run_that_is_not_there_yet_is_waited_for(train: Train, broker: FakeBroker):
    broker.change(run_exists=False)
    training = train().start()
    deadline = time.monotonic() + 20
    while training.status.waiting_for != "run 'test' to be created" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert training.status.waiting_for == "run 'test' to be created"
    broker.change(run_exists=True)
    assert training.join() == "all steps are done"


def test_evaluations_happen_before_between_and_after(train: Train, broker: FakeBroker):
    gone = "trainer.early_stop.metric=eval/heldout/pass@7"
    training = train('trainer.evaluation.sets=["heldout"]', "trainer.evaluation.interval=2", gone).start()
    training.join()
    assert broker.evaluations == [("heldout", 0), ("heldout", 2), ("heldout", 3)]
    evaluations = [line for line in training.lines() if line["kind"] == "evaluation"]
    assert [line["policy_version"] for line in evaluations] == [0, 2, 3]
    assert evaluations[0]["eval/heldout/ans_acc"] == 0.5 and evaluations[0]["eval/heldout/pass@1"] == 0.5
    records = [json.loads(line) for line in (training.folder / "evaluations" / "heldout-step-2.jsonl").open()]
    assert [record["gold"] for record in records] == ["8", "8"]
    assert {"prompt", "prediction", "parsed", "format_valid", "ans_valid", "response_length", "reward"} <= set(
        records[0]
    )
    assert [e.evaluation.policy_version for e in broker.events if e.HasField("evaluation")] == [0, 2, 3]
    lacks = "trainer.early_stop.metric: the evaluation has no eval/heldout/pass@7; it has eval/heldout/prompts, "
    assert sum(event.notice.text.startswith(lacks) for event in broker.events) == 3


def test_an_evaluation_that_lost_prompts_has_no_figure_and_decides_nothing(train: Train, broker: FakeBroker):
    broker.evaluations_lost = {0: 1, 2: 2}
    best, stop = ("trainer.checkpoint.best_metric", "trainer.early_stop.metric")
    metrics = [f"{key}=eval/heldout/ans_acc" for key in (best, stop)]
    training = train(
        'trainer.evaluation.sets=["heldout"]',
        "trainer.evaluation.interval=1",
        "trainer.early_stop.patience=1",
        *metrics,
    ).start()
    assert training.join() == "all steps are done", "no evaluation that was incomplete counts as one without progress"
    lines = {line["policy_version"]: line for line in training.lines() if line["kind"] == "evaluation"}
    figures = {version: line.get("eval/heldout/ans_acc") for version, line in lines.items()}
    assert figures == {0: None, 1: 0.5, 2: None, 3: 0.5}
    assert (lines[2]["eval/heldout/prompts"], lines[2]["eval/heldout/dead"]) == (0, 2)
    assert [event.notice.text.partition(";")[0] for event in broker.events if "incomplete" in event.notice.text] == [
        "evaluation heldout@0 is incomplete: 1 of 2",
        "evaluation heldout@2 is incomplete: 0 of 2",
    ]


def test_an_evaluation_that_does_not_come_about_costs_its_metrics_only(
    train: Train, broker: FakeBroker, receiver: Receivers
):
    broker.evaluation_complete.clear()
    broker.add_member(receiver("one").member)
    training = train('trainer.evaluation.sets=["heldout"]', "trainer.evaluation.timeout_seconds=0.5").start()
    assert training.join(120) == "all steps are done"
    assert any("was not complete within 0.5 s" in event.notice.text for event in broker.events)


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
    broker.evaluation_complete.set()
    assert training.join() == "all steps are done"
    assert [one.installed(v) is not None for v in range(4)] == [True] * 4
    assert late.installed(3) == one.installed(3)


def test_a_rollout_that_comes_while_a_batch_is_awaited_gets_weights_at_once(
    train: Train, broker: FakeBroker, receiver: Receivers
):
    broker.change(batches_allowed=1)
    training = train().start()
    broker.wait_until(lambda: broker.trained == [0])
    assert training.status.published_version == -1
    late = receiver("late")
    broker.add_member(late.member)
    broker.wait_until(lambda: any(event.HasField("weights") for event in broker.events))
    assert late.installed(1) is not None and training.status.published_version == 1
    broker.remove_member("late")
    broker.change(batches_allowed=10**9)
    assert training.join() == "all steps are done", "no rollout is left, and the training goes on"
