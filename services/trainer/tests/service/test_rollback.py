"""A rollback goes back to earlier weights, and what was trained since stays settled."""

import json
from pathlib import Path

import pytest
from fake_broker import FakeBroker
from training import Train, Training, live_until

from quartet_common.ledger import read_ledger
from quartet_trainer import rollback
from quartet_trainer.checkpoints import find_checkpoints, locked_folder
from quartet_trainer.errors import TrainingError
from quartet_trainer.rollback import main, roll_back

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def stopped(train: Train, broker: FakeBroker) -> Training:
    """A training of 10 steps that was stopped after 4, with the checkpoints of the last two."""
    broker.run.spec.max_steps, broker.run.spec.max_staleness = 10, 1
    return live_until(train, broker, 4)


def root_of(training: Training) -> Path:
    return training.folder / "checkpoints"


def ledger_of(root: Path) -> list[tuple[int, int]]:
    """The newest checkpoint's: steps, and how many groups each has."""
    mark = find_checkpoints(root)[-1].manifest["ledger"]
    return [(step, len(names)) for step, names in read_ledger(root / "ledger.jsonl", mark)]


def test_rollback_adds_empty_steps_beyond_the_staleness_and_training_continues_after_them(
    stopped: Training, train: Train, broker: FakeBroker
):
    root = root_of(stopped)
    with (root / "ledger.jsonl").open("a") as ledger:  # a step that was trained, and killed before its checkpoint
        ledger.write('{"step":4,"instances":["pass-0/8","pass-0/9"]}\n{"step":5,"inst')
    done = roll_back(root, "test", 3)
    assert done == {"step": 7, "path": str(root / "step-00000007")}
    newest = find_checkpoints(root)[-1].manifest
    assert (newest["rolled_back"], newest["undone_steps"]) == ({"to": 3, "from": 4}, 4)
    assert ledger_of(root) == [*((step, 2) for step in range(5)), (5, 0), (6, 0)]
    broker.change(settle_from=4)
    assert train().start().join() == "all steps are done"
    assert [opened.checkpoint_step for opened in broker.opened] == [0, 7]
    assert broker.settled == [(4, ["pass-0/8", "pass-0/9"]), (5, []), (6, [])]
    assert broker.trained == [0, 1, 2, 3, 7, 8, 9]
    assert ledger_of(root)[7:] == [(7, 2), (8, 2), (9, 2)]


def test_rollback_again_counts_all_undone_steps(stopped: Training):
    root = root_of(stopped)
    roll_back(root, "test", 3)
    assert roll_back(root, "test", 4) == {"step": 8, "path": str(root / "step-00000008")}
    newest = find_checkpoints(root)[-1].manifest
    assert (newest["undone_steps"], newest["rolled_back"]) == (4, {"to": 4, "from": 6})
    roll_back(root, "test", 6)
    newest = find_checkpoints(root)[-1].manifest
    assert (newest["step"], newest["undone_steps"]) == (10, 7), "it has the weights of step 6, and so of step 3"


def test_interrupted_rollback_leaves_the_old_state_and_is_completed_by_the_next(
    stopped: Training, train: Train, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
):
    root = root_of(stopped)

    def killed(*_: object) -> None:
        raise OSError(28, "No space left on device", "model")

    with monkeypatch.context() as patch:
        patch.setattr(rollback, "_copy", killed)
        with pytest.raises(OSError, match="No space"):
            roll_back(root, "test", 3)
    assert find_checkpoints(root)[-1].step == 4 and len(ledger_of(root)) == 4
    done = roll_back(root, "test", 3)
    assert done["step"] == 6 and ledger_of(root)[4:] == [(4, 0), (5, 0)]
    assert roll_back(root, "test", 3) == done, "a repeated one finds its checkpoint"
    assert len(ledger_of(root)) == 6


def test_a_trainer_started_after_an_interrupted_rollback_continues_from_the_old_checkpoint(
    stopped: Training, train: Train, broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rollback, "_copy", lambda *_: Path("nowhere"))
    roll_back(root_of(stopped), "test", 3)
    broker.change(settle_from=4)
    train().start().join()
    assert broker.settled == [] and broker.trained == list(range(10))


def test_rollback_refuses_what_is_not_kept_and_names_what_is(stopped: Training):
    root = root_of(stopped)
    kept = [each.step for each in find_checkpoints(root)]
    allowed = "allowed: the steps of the earlier ones, " + ", ".join(map(str, kept[:-1])) + "$"
    for step in (0, 4, 9):
        with pytest.raises(TrainingError, match=f"got {step}, and .* of step 4; {allowed}"):
            roll_back(root, "test", step)
    with pytest.raises(TrainingError, match="is not of run 'other'"):
        roll_back(root, "other", 3)
    with pytest.raises(TrainingError, match="there is no folder"):
        roll_back(root / "nothing", "test", 3)
    assert not (root / "nothing").exists() and [each.step for each in find_checkpoints(root)] == kept


def test_rollback_refuses_while_a_trainer_has_the_folder(stopped: Training, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("quartet_trainer.checkpoints.LOCK_SECONDS", 0.1)
    command = str(root_of(stopped)), "test", "3"
    with locked_folder(root_of(stopped), lambda _: None):
        assert main(*command) == 2
    assert "is in use by another trainer" in capsys.readouterr().err
    assert main(*command) == 0 and json.loads(capsys.readouterr().out)["step"] == 6


def test_rollback_refuses_a_ledger_of_another_history(stopped: Training, capsys):
    path = root_of(stopped) / "ledger.jsonl"
    path.write_text(path.read_text().replace("pass-0/3", "pass-0/9"))
    assert main(str(root_of(stopped)), "test", "3") == 2
    assert "have the checksum" in capsys.readouterr().err
