"""A checkpoint is there whole or not at all, and training goes on from it as if nothing had happened."""

from __future__ import annotations

import json
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import Run, make_batch, make_model, settings
from processes import FORKS, Forked

from quartet_trainer.checkpoints import atomic_folder, checkpoint_folder, find_checkpoints, prune
from quartet_trainer.learner import LearnerError, create_learner, storage


def write(root: Path, step: int, text: str = "weights") -> Path:
    folder = checkpoint_folder(root, step)
    with atomic_folder(folder, {"format": 1, "step": step}) as writing:
        (writing / "model").mkdir()
        (writing / "model" / "weights").write_text(text, encoding="utf-8")
    return folder


def steps(root: Path) -> list[int]:
    return [checkpoint.step for checkpoint in find_checkpoints(root)]


def test_found_in_order_of_steps(tmp_path: Path) -> None:
    for step in (100_000_000, 5, 20):
        write(tmp_path, step)
    assert steps(tmp_path) == [5, 20, 100_000_000]
    assert steps(tmp_path / "nowhere") == []


def test_incomplete_ones_are_not_found(tmp_path: Path) -> None:
    short, lacking, unmarked, _ = (write(tmp_path, step) for step in (1, 2, 3, 4))
    (short / "model" / "weights").write_text("wei", encoding="utf-8")
    (lacking / "model" / "weights").unlink()
    (unmarked / "manifest.json").unlink()
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint", encoding="utf-8")
    assert steps(tmp_path) == [4]


def test_a_failure_while_writing_leaves_the_older_one(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    with (
        pytest.raises(OSError, match="disk full"),
        atomic_folder(checkpoint_folder(tmp_path, 1), {"step": 1}) as folder,
    ):
        (folder / "half").write_text("ha", encoding="utf-8")
        raise OSError("disk full")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert (checkpoint_folder(tmp_path, 1) / "model" / "weights").read_text(encoding="utf-8") == "old"


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 1, "old")
    write(tmp_path, 1, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert (checkpoint_folder(tmp_path, 1) / "model" / "weights").read_text(encoding="utf-8") == "new"


def test_killed_while_replacing_one_the_older_is_still_found(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, "old")
    folder.rename(folder.with_name(folder.name + ".replaced"))  # the state between the two renames
    assert steps(tmp_path) == [1]
    assert prune(tmp_path, keep_last=1) == []
    assert steps(tmp_path) == [1]
    write(tmp_path, 1, "new")
    assert (find_checkpoints(tmp_path)[0].path / "model" / "weights").read_text(encoding="utf-8") == "new"


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (tmp_path / ".writing-step-00000005").mkdir()
    assert [checkpoint.step for checkpoint in prune(tmp_path, keep_last=2)] == [1, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    with pytest.raises(ValueError, match="keep_last: got 0, allowed: 1 or more"):
        prune(tmp_path, keep_last=0)


def stalling_writer(said: Connection, model: Path, root: Path, values: dict[str, Any]) -> None:
    """Write a checkpoint, and of a second one the model but not the optimizer."""
    learner = create_learner(settings(**values), model, Run())
    learner.train_step(make_batch(seed=1))
    learner.save(root / "step-00000001", {"seen": 1})
    learner.train_step(make_batch(seed=2))

    def stall(*arguments: Any) -> None:
        said.send("stalled")
        time.sleep(600)

    storage.write_optimizer = stall
    learner.save(root / "step-00000002", {"seen": 2})


VALUE_HEAD = {"algorithm": "ppo", "max_mean_ratio": 0, "critic": {"form": "head", "learning_rate": 1e-2}}


@pytest.mark.parametrize("values", [{}, VALUE_HEAD], ids=["grpo", "value head"])
def test_killed_while_saving(model_path: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    ours, theirs = FORKS.Pipe()
    process = Forked(tmp_path / "stderr", stalling_writer, theirs, model_path, tmp_path, values)
    try:
        assert ours.poll(60) and ours.recv() == "stalled", process.said()
    finally:
        process.end()
    assert (tmp_path / ".writing-step-00000002" / "model" / "model.safetensors").exists()
    (checkpoint,) = find_checkpoints(tmp_path)
    assert checkpoint.step == 1

    learner, unkilled = (create_learner(settings(**values), model_path, Run()) for _ in range(2))
    assert learner.load(checkpoint.path) == {"seen": 1}
    unkilled.train_step(make_batch(seed=1))
    for one in (learner, unkilled):
        one.train_step(make_batch(seed=2))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(learner.weights(), unkilled.weights(), strict=True))
    if values:
        ours, theirs = learner._critic.copies(), unkilled._critic.copies()
        assert ours.keys() == theirs.keys() >= {"model/weight", "exp_avg_sq/bias"}
        assert all(torch.equal(tensor, theirs[name]) and tensor.any() for name, tensor in ours.items())
    learner.save(tmp_path / "step-00000002", {"seen": 2})
    assert steps(tmp_path) == [1, 2]


def test_resumed_training_takes_identical_steps(model_path: Path, tmp_path: Path) -> None:
    values = {"precision": "fp32", "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1}
    batches = [make_batch(seed=30 + step) for step in range(6)]
    unbroken = create_learner(settings(**values), model_path, Run(max_steps=6))
    for groups in batches[:3]:
        unbroken.train_step(groups)
    unbroken.save(tmp_path / "step-00000003", {"consumed": ["pass-0/1"], "session": 4})
    expected = [unbroken.train_step(groups) for groups in batches[3:]]

    resumed = create_learner(settings(**values), model_path, Run(max_steps=6))
    resumed.train_step(batches[5])  # whatever it did before the load is forgotten
    assert resumed.load(tmp_path / "step-00000003") == {"consumed": ["pass-0/1"], "session": 4}
    assert resumed.step == 3
    found = [resumed.train_step(groups) for groups in batches[3:]]
    for ours, theirs in zip(found, expected, strict=True):
        assert {k: v for k, v in ours.items() if "seconds" not in k} == {
            k: v for k, v in theirs.items() if "seconds" not in k
        }
    for (name, ours), (_, theirs) in zip(resumed.weights(), unbroken.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_what_is_not_this_models_checkpoint_is_refused(model_path: Path, tmp_path: Path) -> None:
    learner = create_learner(settings(), model_path, Run())
    with pytest.raises(LearnerError, match="is no complete checkpoint"):
        learner.load(tmp_path)
    other = create_learner(settings(), make_model(tmp_path / "other", hidden_size=16), Run())
    other.save(tmp_path / "checkpoint", {})
    with pytest.raises(LearnerError, match=r"holds model\.\S+ \[\d+, 16\], which this model has not"):
        learner.load(tmp_path / "checkpoint")
    manifest = tmp_path / "checkpoint" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text(encoding="utf-8")), "format": 2}), encoding="utf-8")
    with pytest.raises(LearnerError, match="has checkpoint format 2; this trainer reads 1"):
        learner.load(tmp_path / "checkpoint")


def test_a_folder_that_cannot_be_written_is_one_sentence(model_path: Path, tmp_path: Path) -> None:
    learner = create_learner(settings(), model_path, Run())
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(LearnerError, match="could not write the checkpoint"):
        learner.save(tmp_path / "file" / "step-00000000", {})
    with pytest.raises(LearnerError, match="could not write the checkpoint .*not JSON serializable"):
        learner.save(tmp_path / "step-00000000", {"tensor": torch.zeros(1)})
    assert steps(tmp_path) == []
