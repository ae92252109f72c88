"""A checkpoint is there whole or not at all, and training goes on from it as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from learner_helpers import Run, all_parameters, make_batch, make_learner, make_model
from processes import Forked

from quartet_common.ledger import Ledger
from quartet_common.ports import free_port
from quartet_trainer.checkpoints import atomic_folder, checkpoint_folder, find_checkpoints, prune
from quartet_trainer.launch import leave_process
from quartet_trainer.learner import LearnerError, storage
from quartet_trainer.rollback import roll_back


def write(root: Path, step: int, text: str = "weights") -> Path:
    folder = checkpoint_folder(root, step)
    with atomic_folder(folder, {"format": 1, "step": step}) as writing:
        (writing / "model").mkdir()
        (writing / "model" / "weights").write_text(text, encoding="utf-8")
    return folder


def read(root: Path) -> dict[int, str]:
    found = find_checkpoints(root)
    return {each.step: (each.path / "model" / "weights").read_text(encoding="utf-8") for each in found}


def test_found_in_order_of_steps_and_only_where_complete(tmp_path: Path) -> None:
    short, lacking, unmarked, *_ = (write(tmp_path, step) for step in (1, 2, 3, 100_000_000, 5, 20))
    (short / "model" / "weights").write_text("wei", encoding="utf-8")
    (lacking / "model" / "weights").unlink()
    (unmarked / "manifest.json").unlink()
    unreadable = tmp_path / "step-00000007"
    unreadable.mkdir()
    (unreadable / "manifest.json").write_text('{"step": 7, "files": {"' + 256 * "x" + '": 1}}')  # stat fails
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / "notes.txt").write_text("not a checkpoint", encoding="utf-8")
    assert list(read(tmp_path)) == [5, 20, 100_000_000]
    assert find_checkpoints(tmp_path / "nowhere") == []


def test_a_failure_while_writing_leaves_the_older_one_and_another_attempt_replaces_it(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, "old")
    with pytest.raises(OSError, match="disk full"), atomic_folder(folder, {"step": 1}) as writing:
        (writing / "half").write_text("ha", encoding="utf-8")
        raise OSError("disk full")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert read(tmp_path) == {1: "old"}
    (tmp_path / ".writing-step-00000001" / "half").mkdir(parents=True)  # of a process that was killed
    write(tmp_path, 1, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert read(tmp_path) == {1: "new"}


def test_killed_while_replacing_one_the_older_is_still_found(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, "old")
    folder.rename(folder.with_name(folder.name + ".replaced"))  # the state between the two renames
    assert prune(tmp_path, keep_last=1) == []
    assert read(tmp_path) == {1: "old"}
    write(tmp_path, 1, "new")
    assert read(tmp_path) == {1: "new"}


def test_killed_while_removing_one_the_rest_is_removed_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, step)

    def die(folder: Path) -> None:
        (folder / "manifest.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr(shutil, "rmtree", die)
        prune(tmp_path, keep_last=1)
    prune(tmp_path, keep_last=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"]


def assert_same_state(one: Any, other: Any) -> None:
    """To the last bit."""
    for (name, ours), (_, theirs) in zip(all_parameters(one._plugin), all_parameters(other._plugin), strict=True):
        assert torch.equal(ours, theirs), name
    if one._critic:
        ours, theirs = one._critic.copies(), other._critic.copies()
        assert ours.keys() == theirs.keys() and any(name.startswith("exp_avg_sq/") for name in ours)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


SEPARATE = {"algorithm": "ppo", "max_mean_ratio": 0, "critic": {"learning_rate": 1e-2}}
HEAD = {**SEPARATE, "critic": {"form": "head", "learning_rate": 1e-2}}


@pytest.mark.parametrize(
    "values",
    [
        {"precision": "fp32", "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1},
        SEPARATE,
        {"kl_coefficient": 0.3, "kl_target": 1e-3, "kl_horizon": 7, "entropy_target": 3.5, "learning_rate": 1e-2},
        {**HEAD, "lora": {"r": 4, "target_modules": ["q_proj"]}},
    ],
    ids=["cosine", "critic", "coefficients that adapt", "value head, adapter"],
)
def test_resumed_training_takes_identical_steps(model_path: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    """From a checkpoint that was written while training went on."""
    batches = [make_batch(seed=30 + step) for step in range(6)]
    unbroken, resumed = (make_learner(model_path, Run(max_steps=6), **values) for _ in range(2))
    for groups in batches[:3]:
        unbroken.train_step(groups)
    folder = tmp_path / "step-00000003"
    write = unbroken.snapshot(folder, {})
    expected = [unbroken.train_step(groups) for groups in batches[3:]]
    write()

    resumed.train_step(batches[5])  # whatever it did before the load is forgotten
    resumed.load(folder)
    assert resumed.step == 3
    found = [resumed.train_step(groups) for groups in batches[3:]]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[name] == value for name, value in theirs.items() if "seconds" not in name)
    assert_same_state(resumed, unbroken)


@pytest.mark.parametrize("values", [{"schedule": "cosine"}, HEAD], ids=["cosine", "value head"])
def test_rolled_back_learner_takes_the_steps_that_follow_the_earlier_checkpoint(
    model_path: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    """The weights, AdamW's state and the learning rate are of step 2, the step number is of a version that is new."""
    batches = [make_batch(seed=30 + step) for step in range(4)]
    unbroken, rolled_back = (make_learner(model_path, Run(max_steps=9), warmup_steps=3, **values) for _ in range(2))
    rates = []
    for step, groups in enumerate(batches, start=1):
        rates.append(unbroken.train_step(groups)["learning_rate"])
        unbroken.snapshot(tmp_path / f"step-{step:08}", RUN_FACTS)()
    (tmp_path / "ledger.jsonl").write_text("".join(f'{{"step":{n},"instances":["{n}"]}}\n' for n in range(4)))
    mark_newest(tmp_path)
    done = roll_back(tmp_path, "test", 2)
    rolled_back.load(Path(done["path"]))
    earlier = make_learner(model_path, Run(max_steps=9), warmup_steps=3, **values)
    earlier.load(tmp_path / "step-00000002")
    assert (rolled_back.step, rolled_back.undone, earlier.step) == (6, 4, 2)
    assert_same_state(rolled_back, earlier)
    assert rolled_back.train_step(batches[2])["learning_rate"] == rates[2]
    rolled_back.snapshot(tmp_path / "again", {})()
    earlier.load(tmp_path / "again")
    assert (earlier.step, earlier.undone) == (7, 4)
    assert earlier.train_step(batches[3])["learning_rate"] == rates[3]
    unbroken.load(tmp_path / "step-00000002")
    for groups in batches[2:]:
        unbroken.train_step(groups)
    assert_same_state(earlier, unbroken)


RUN_FACTS = {"run_id": "test", "first_remembered_pass": 0, "max_staleness": 1}


def mark_newest(root: Path) -> None:
    """Have the newest checkpoint's manifest name the ledger beside it."""
    path = find_checkpoints(root)[-1].path / "manifest.json"
    ledger = Ledger(root / "ledger.jsonl")
    path.write_text(json.dumps({**json.loads(path.read_text()), "ledger": ledger.mark()}))
    ledger.close()


def test_a_checkpoint_does_not_depend_on_how_the_settings_were_written(model_path: Path, tmp_path: Path) -> None:
    """In its manifest they say what it was; those of builds whose [trainer] had the algorithm's keys are such."""
    learner, resumed = (make_learner(model_path) for _ in range(2))
    learner.train_step(make_batch())
    learner.snapshot(tmp_path / "checkpoint", {})()
    file = tmp_path / "checkpoint" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["settings"] |= {"algorithm": "dapo", "clip_low": None, "gae_lambda": 0.95, "critic": {"form": "separate"}}
    file.write_text(json.dumps(manifest))
    resumed.load(tmp_path / "checkpoint")
    assert_same_state(resumed, learner)


def test_what_is_not_this_models_checkpoint_is_refused(model_path: Path, tmp_path: Path) -> None:
    learner, separate = (make_learner(model_path, **values) for values in ({}, SEPARATE))
    with pytest.raises(LearnerError, match="is no complete checkpoint"):
        learner.load(tmp_path)
    other = make_learner(make_model(tmp_path / "other", hidden_size=16))
    other.snapshot(tmp_path / "checkpoint", {})()
    with pytest.raises(LearnerError, match=r"holds model\.\S+ \[\d+, 16\], which this model has not"):
        learner.load(tmp_path / "checkpoint")
    learner.snapshot(tmp_path / "learner", {})()
    with pytest.raises(LearnerError, match="has no critic; it was not written by a training with one"):
        separate.load(tmp_path / "learner")


def rank_of_two(rank: int, port: int, model: Path, root: Path) -> None:
    """Two ranks: a checkpoint of which one cannot write its share, and one that is written."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    learner = make_learner(model, plugin="torch_fsdp")
    learner.train_step(make_batch(seed=1))
    write_optimizer = storage.write_optimizer

    no_utf8 = "disk full: caf\udce9"  # as os.fsdecode gives it
    for failure, said in ((OSError(no_utf8), no_utf8), (KeyError("exp_avg"), r"KeyError\('exp_avg'\)")):
        storage.write_optimizer = Mock(side_effect=failure) if rank == 1 else write_optimizer
        with pytest.raises(LearnerError, match=f"could not write the checkpoint .*full: {said}"):
            learner.snapshot(root / "full", {})()
    storage.write_optimizer = write_optimizer
    write = learner.snapshot(root / "step-00000001", {"seen": 1})
    with ThreadPoolExecutor(1) as executor:
        done = executor.submit(write)
        learner.train_step(make_batch(seed=2))  # its collectives go on beside the writing
        done.result()
    leave_process(0)


def test_each_rank_writes_its_share_and_a_single_one_reads_them_all(model_path: Path, tmp_path: Path) -> None:
    port = free_port()
    ranks = [Forked(tmp_path / f"stderr-{n}", rank_of_two, n, port, model_path, tmp_path) for n in (0, 1)]
    try:
        assert [rank.wait(200) for rank in ranks] == [0, 0], [rank.said()[-3000:] for rank in ranks]
    finally:
        for rank in ranks:
            rank.end()
    (checkpoint,) = find_checkpoints(tmp_path)
    assert not (tmp_path / "full").exists() and not list(tmp_path.glob(".writing-*"))
    for pattern in ("model/model-*.safetensors", "optimizer-*.safetensors"):
        shares = [path.stat().st_size for path in sorted(checkpoint.path.glob(pattern))]
        assert len(shares) == 2 and max(shares) < 0.65 * sum(shares), pattern
    learner, unbroken = (make_learner(model_path) for _ in range(2))
    learner.load(checkpoint.path)
    unbroken.train_step(make_batch(seed=1))
    for one in (learner, unbroken):
        one.train_step(make_batch(seed=2))
    for (name, ours), (_, theirs) in zip(learner.weights(), unbroken.weights(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8, msg=name)
