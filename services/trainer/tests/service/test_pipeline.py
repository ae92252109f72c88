"""What goes on beside the training: the next batch fetched, weights sent, checkpoints written; and what may stop it."""

import fcntl
import json
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
from fake_broker import FakeBroker
from quartet.v1 import broker_pb2
from receiver import Receivers
from training import Train

from quartet_trainer import checkpoints, evaluation
from quartet_trainer.checkpointer import EarlyStopping
from quartet_trainer.checkpoints import find_checkpoints
from quartet_trainer.config import EarlyStopSection
from quartet_trainer.control import Stopped
from quartet_trainer.errors import TrainingError
from quartet_trainer.loop import LOOK_SECONDS

pytestmark = pytest.mark.timeout(180)


def test_the_next_batch_is_fetched_while_this_one_is_trained_and_is_the_next_lifes_first(
    train: Train, broker: FakeBroker
):
    first = train()
    go_on = first.start_held(0)
    broker.wait_until(lambda: broker.granted == {0, 1})
    assert broker.trained == [], "a step is announced when it has ended"
    first.control.stop()
    go_on.set()
    assert first.join() == "the trainer was asked to stop"
    assert broker.trained == [0] and broker.committed == [1], "the step in progress has ended, and is saved"
    promised = list(broker.batches[1])
    assert train().start().join() == "all steps are done"
    assert broker.trained == [0, 1, 2] and broker.batches[1] == promised
    assert broker.granted == {0, 1, 2}, "nothing beyond the last step is fetched"


def test_a_step_is_trained_while_weights_are_sent(train: Train, broker: FakeBroker, receiver: Receivers):
    # It stops in the midst of version 1, and lives.
    one = receiver("one", at=(1, 0, signal.SIGSTOP))
    broker.add_member(one.member)
    broker.change(batches_allowed=1)
    training = train().start()
    broker.wait_until(lambda: broker.trained == [0])
    one.wait_until_stopped()
    broker.change(batches_allowed=10**9)
    broker.wait_until(lambda: broker.trained == [0, 1])  # version 1 is not there yet
    assert one.installed(1) is None
    one.send(signal.SIGCONT)
    assert training.join(120) == "all steps are done"
    assert one.installed(1) is not None
    versions = [event.weights.policy_version for event in broker.events if event.HasField("weights")]
    assert versions == sorted(set(versions)) and versions[-1] == 3
    assert len({one.installed(version) for version in versions}) == len(versions), "each with its own weights"


def test_rollouts_sleep_while_a_step_is_trained_and_are_woken_by_the_new_weights_or_its_failure(
    train: Train, broker: FakeBroker, receiver: Receivers
):
    one = receiver("one")
    broker.add_member(one.member)
    training = train("trainer.weights.sleep_rollouts=true")
    seen: list[list[str]] = []

    def fail_at_2(step: int) -> None:
        seen.append(one.log())
        if step == 2:
            raise TrainingError("out of memory")

    training.learner.before_step = fail_at_2
    with pytest.raises(TrainingError, match="out of memory"):
        training.start().join(120)
    asleep, awake = "sleep 1 for 30 s", "sleep 0 for 30 s"
    assert one.log() == ["version 0", asleep, "version 1", asleep, "version 2", asleep, awake]
    assert [len(log) for log in seen] == [2, 4, 6], "asleep before each step, with the weights of the last"


def test_a_step_is_trained_while_a_checkpoint_is_written_and_committed_only_then(train: Train, broker: FakeBroker):
    training = train("trainer.checkpoint.interval=1")
    go_on = training.start_held(1, at="before_write")
    broker.wait_until(lambda: broker.trained == [0, 1])
    assert broker.committed == [] and training.status.checkpoint_step == 0
    go_on.set()
    assert training.join() == "all steps are done"
    assert broker.committed == [1, 2, 3]


def test_a_checkpoint_that_cannot_be_written_ends_the_training(train: Train, broker: FakeBroker):
    training = train("trainer.checkpoint.interval=1")

    def fail(step: int) -> None:
        raise TrainingError("no space left on device")

    training.learner.before_write = fail
    requested = training.control.request_checkpoint()
    with pytest.raises(TrainingError, match="no space left"):
        training.start().join()
    assert broker.committed == [] and not broker.finished
    assert isinstance(requested.exception(0), Stopped), "whoever asked for a checkpoint is answered"


@pytest.mark.parametrize(("failure", "stops"), [(TrainingError, 1), (RuntimeError, 0)])
def test_other_ranks_are_not_called_where_they_may_wait_in_a_collective(train: Train, failure: type, stops: int):
    training = train()
    training.learner.before_step = Mock(side_effect=failure("out of memory"))
    training.learner.stop = Mock()
    with pytest.raises(failure, match="out of memory"):
        training.start().join()
    assert training.learner.stop.call_count == stops


def test_a_second_trainer_is_kept_out_of_the_folder(train: Train, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(checkpoints, "LOCK_SECONDS", 0.3)
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    with (root / ".lock").open("a+") as other:
        other.write('{"host": "elsewhere", "pid": 7}\n')
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(TrainingError, match=r"in use by another trainer \(.*elsewhere.*checkpoint.folder"):
            train().start().join()
    assert train().start().join() == "all steps are done", "the lock ends with its holder"


def test_a_full_disk_is_reported_when_the_folder_is_locked(train: Train, tmp_path: Path):
    root = tmp_path / "run" / "checkpoints"
    root.mkdir(parents=True)
    (root / ".lock").symlink_to("/dev/full")
    with pytest.raises(TrainingError, match="cannot write in the folder of checkpoints"):
        train().start().join()


def test_old_checkpoints_that_cannot_be_removed_do_not_end_the_training(train: Train, broker: FakeBroker, caplog):
    training = train("trainer.checkpoint.interval=1", "trainer.checkpoint.keep_last=1")
    root = training.folder / "checkpoints"
    root.mkdir(parents=True)
    (root / ".writing-it").touch()  # not a folder: rmtree fails
    assert training.start().join() == "all steps are done"
    assert broker.committed == [1, 2, 3] and len(find_checkpoints(root)) == 3
    assert "old checkpoints cannot be removed: " in caplog.text


def test_the_best_checkpoint_is_kept(train: Train, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch):
    broker.run.spec.max_steps = 6
    accuracies = [0.1, 0.4, 0.9, 0.5, 0.6, 0.7, 0.8]  # by version

    def metrics(name: str, transcripts: list, dead: int) -> dict[str, float]:
        return {f"eval/{name}/ans_acc": accuracies[transcripts[0].completions[0].version_spans[0].policy_version]}

    monkeypatch.setattr(evaluation, "evaluation_metrics", metrics)
    evaluated = ('trainer.evaluation.sets=["heldout"]', "trainer.evaluation.interval=1")
    best = ("trainer.checkpoint.best_metric=eval/heldout/ans_acc", "trainer.checkpoint.keep_last=1")
    training = train(*evaluated, *best, "trainer.checkpoint.interval=2")
    training.start().join()
    root = training.folder / "checkpoints"
    assert [found.step for found in find_checkpoints(root)] == [2, 6]
    assert json.loads((root / "best.json").read_text()) == {"metric": "eval/heldout/ans_acc", "value": 0.9, "step": 2}


def test_a_run_that_is_cancelled_before_an_evaluation_has_ended(train: Train, broker: FakeBroker):
    training = train('trainer.evaluation.sets=["heldout"]', "trainer.evaluation.interval=1")
    go_on = training.start_held(0)
    broker.run.state = broker_pb2.RUN_STATE_CANCELLED
    go_on.set()
    assert training.join() == "the run was ended"
    assert broker.evaluations == [("heldout", 0)]


def test_patience_survives_a_restart_and_counts_a_step_once():
    settings = EarlyStopSection(mode="min", patience=2)
    patience = EarlyStopping(settings)
    assert not patience.exhausted_by(1, 3.0)
    assert not patience.exhausted_by(2, 3.0)
    later = EarlyStopping(settings)
    later.restore(json.loads(json.dumps(patience.to_json())))
    assert not later.exhausted_by(2, 3.0), "the same evaluation, made again after a restart"
    assert later.exhausted_by(3, 4.0)
    other = EarlyStopping(EarlyStopSection(metric="eval/heldout/reward", mode="min", patience=2))
    other.restore(patience.to_json())
    assert not other.exhausted_by(3, 4.0), "values of another metric do not count"


def test_a_paused_training_begins_no_step(train: Train, broker: FakeBroker):
    training = train()
    go_on = training.start_held(0)
    assert training.control.pause() == 1, "step 0 is in progress"
    training.control.request_checkpoint().cancel()  # its caller has hung up
    go_on.set()
    broker.wait_until(lambda: broker.trained == [0])
    assert training.control.pause() == 1 and not training.control.begin_step(1)
    waited = training.control.request_checkpoint()
    assert waited.result(30).step == 1, "requests are answered"
    assert broker.trained == [0] and training.status.waiting_for == "Resume: the training is paused"
    training.control.resume()
    assert training.join() == "all steps are done"
    assert training.status.waiting_for == ""


def test_a_pause_with_a_limit_ends_by_itself(train: Train, broker: FakeBroker):
    training = train()
    go_on = training.start_held(0)
    training.control.pause(1.2)
    training.control.pause(0.1)  # a longer pause stays
    go_on.set()
    assert training.join() == "all steps are done"
    assert 0 < training.status.phase_seconds()["paused"] < LOOK_SECONDS, "it ends in time, not at the next look"
