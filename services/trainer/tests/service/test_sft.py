"""`quartet-trainer FILE --sft` as processes: resumes, ranks, the end; and its checks of a run file."""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import Forked
from safetensors.torch import load_file
from trainer_process import TrainerProcess

from quartet_common.config import ConfigError, load_config
from quartet_trainer.config import TrainerSection
from quartet_trainer.learner.checks import check_model_folder
from quartet_trainer.preflight import preflight_sft
from quartet_trainer.sft_data import SftData


def write(path: Path, count: int, seed: int = 0) -> Path:
    """Rows that are learned quickly: each token is followed by the next number."""
    rng = np.random.default_rng(seed)
    rows = [[int(first + n) % 60 for n in range(rng.integers(2, 12))] for first in rng.integers(0, 60, count)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def basics(model_path: Path, tmp_path: Path) -> tuple[str, ...]:
    return (
        f"model.path={model_path}",
        f"sft.data={write(tmp_path / 'train.jsonl', 90)}",
        f"sft.evaluation.held={write(tmp_path / 'held.jsonl', 20, seed=1)}",
        "sft.rows_per_step=8",
        "trainer.learning_rate=3e-3",
        "trainer.tensorboard=false",
        "server.metrics=false",
    )


@pytest.fixture
def start(basics: tuple[str, ...], tmp_path: Path) -> Iterator[Any]:
    started: list[Forked] = []

    def start(run: str, *overrides: str) -> TrainerProcess:
        own = (f"run.folder={tmp_path / run}", *basics, *overrides)
        process = TrainerProcess(tmp_path, *own, options=("--sft",))
        started.append(process)
        return process

    yield start
    for process in started:
        process.end()


def records(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    read = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record for record in read if record["kind"] == kind]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["train/loss"]) for record in records(folder)]


def test_a_killed_training_resumes_bit_for_bit(start: Any, tmp_path: Path) -> None:
    settings = ("sft.epochs=10", "trainer.checkpoint.interval=10", "trainer.evaluation.interval=100")
    assert start("whole", *settings, "trainer.schedule=cosine").outcome()[0] == 0
    for steps in (25, 70):
        killed = start("killed", *settings, "trainer.schedule=cosine")
        killed.wait_for(lambda steps=steps: len(records(tmp_path / "killed")) >= steps)
        killed.send(signal.SIGKILL)
        killed.wait()
    status, said = start("killed", *settings, "trainer.schedule=cosine").outcome()
    assert status == 0 and "resuming from checkpoint" in said, said
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert len(losses(whole)) == 113  # 10 passes over 90 rows by 8
    assert losses(killed) == losses(whole)
    assert [r["eval/held/loss"] for r in records(killed, "evaluation")] == [
        r["eval/held/loss"] for r in records(whole, "evaluation")
    ]
    for name, tensor in load_file(whole / "model" / "model.safetensors").items():
        assert load_file(killed / "model" / "model.safetensors")[name].equal(tensor), name
    first, last = records(whole, "evaluation")[0], records(whole, "evaluation")[-1]
    assert (first["step"], last["step"]) == (0, 113) and last["eval/held/loss"] < 0.5 * first["eval/held/loss"]


def test_sigterm_saves_a_checkpoint_from_which_other_rows_are_refused(start: Any, tmp_path: Path) -> None:
    stopped = start("run", "sft.epochs=2000", "trainer.checkpoint.interval=0")
    stopped.wait_for(lambda: len(records(tmp_path / "run")) >= 3)
    stopped.send(signal.SIGTERM)
    assert stopped.outcome()[0] == 0
    assert not (tmp_path / "run" / "model").exists()
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    assert int(checkpoint.name.removeprefix("step-")) == len(records(tmp_path / "run"))
    status, said = start("run", "sft.epochs=2000", f"sft.data={write(tmp_path / 'other.jsonl', 90, seed=5)}").outcome()
    assert status == 1 and "are of other rows, or of another sft.rows_per_step, shuffle or shuffle_seed" in said, said


def test_two_ranks_compute_what_one_does(start: Any, tmp_path: Path) -> None:
    exact = ("trainer.precision=fp64", "run.max_steps=3")
    assert start("one", *exact).outcome()[0] == 0
    tp = ("trainer.ranks=2", "trainer.plugin=hybrid_parallel", "trainer.tp_size=2")
    status, said = start("two", *exact, *tp).outcome()
    assert status == 0, said
    assert [loss for _, loss in losses(tmp_path / "two")] == pytest.approx(
        [loss for _, loss in losses(tmp_path / "one")], rel=1e-7
    )
    for two, one in zip(records(tmp_path / "two", "evaluation"), records(tmp_path / "one", "evaluation"), strict=True):
        assert two["eval/held/loss"] == pytest.approx(one["eval/held/loss"], rel=1e-6)


def check(basics: tuple[str, ...], folder: Path, *overrides: str) -> dict[str, Any]:
    config = load_config("trainer", TrainerSection, None, [*basics, f"run.folder={folder}", *overrides])
    return preflight_sft(dataclasses.replace(config, dry_run=True))


def test_a_dry_run_counts_rows_tokens_and_steps(basics: tuple[str, ...], tmp_path: Path) -> None:
    plan = check(basics, tmp_path / "run", "sft.epochs=2")
    rows = [json.loads(line)["input_ids"] for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    tokens = sum(map(len, rows))
    assert (plan["rows"], plan["tokens"], plan["tokens_in_loss"], plan["steps"]) == (90, tokens, tokens - 90, 23)
    assert plan["evaluation"] == {"held": 20} and not (tmp_path / "run").exists()


def test_every_row_is_trained_once_in_each_epoch(basics: tuple[str, ...], tmp_path: Path) -> None:
    config = load_config("trainer", TrainerSection, None, [*basics, "sft.epochs=2"])
    data = SftData.read(config, check_model_folder(config.model.path))
    rows = [id(row) for step in range(data.steps) for row in data.batch(step)]
    assert Counter(rows) == dict.fromkeys(map(id, data.train), 2)
    assert (data.epoch(1), data.epoch(data.steps)) == (8 / 90, 2)


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("sft.rows_per_stp=4", "unknown key sft.rows_per_stp in --set: did you mean 'rows_per_step'?"),
        ("sft.rows_per_step=0", "sft.rows_per_step: got 0 in --set: input should be greater than or equal to 1"),
        ("sft.long_rows=cut", "sft.long_rows: got 'cut' in --set: input should be 'refuse', 'drop' or 'truncate'"),
        ("sft.data={path='a.jsonl', split='train'}", "split belongs to a dataset of the hub, and path is given"),
        ("sft.data={path='a.jsonl', fields={prompt='q', answer='a'}}", "a row has no field 'answer'"),
        ("sft.data=gone.jsonl", "sft.data: there is no file 'gone.jsonl'; it would be '"),
        ("sft.data=rows.parquet", "sft.data: the trainer alone reads JSONL whose rows have the fields' names"),
        ("sft.epochs=0", "sft.epochs = 0 goes on until run.max_steps, which is not set: set either above 0"),
        ("sft.max_tokens=4000", "sft.max_tokens: got 4000; the model reads at most 128"),
        ("sft.max_tokens=4", "tokens; the model reads at most 4"),
        ("trainer.evaluation.sets=['heldout']", "[sft.evaluation] has no set 'heldout'; allowed: held"),
        (
            "trainer.early_stop.metric=eval/held/accuracy",
            "trainer.early_stop.metric: no evaluation has 'eval/held/accuracy'; allowed: eval/held/loss",
        ),
        (
            "trainer.checkpoint.best_metric=eval/held/loss",
            'a lower loss is better; set trainer.checkpoint.best_mode = "min"',
        ),
        ("trainer.warmup_steps=400", None),
        ("trainer.schedule=linear", "trainer.schedule: a linear over 12 steps with 400 steps of warm-up has no room"),
    ],
    ids=lambda value: value if value and "=" in value else None,
)
def test_a_dry_run_refuses_mistakes(
    basics: tuple[str, ...], tmp_path: Path, override: str, sentence: str | None
) -> None:
    more = ("trainer.warmup_steps=400",) if "schedule" in override else ()
    if sentence is None:  # constant after a warm-up that never ends
        assert check(basics, tmp_path / "run", override)["steps"] == 12
        return
    with pytest.raises(ConfigError) as refusal:
        check(basics, tmp_path / "run", override, *more)
    assert sentence in str(refusal.value), refusal.value


def test_keys_without_effect_are_named(
    basics: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    own = ("run.group_size=4", "run.system_prompt=brief", "trainer.algorithm=dapo", "trainer.epochs=3")
    check(basics, tmp_path / "run", *own, "trainer.warmup_steps=13", "trainer.learning_rate=0")
    assert [record.message for record in caplog.records] == [
        "without effect in supervised fine-tuning: run.group_size, trainer.algorithm, trainer.epochs",
        "trainer.learning_rate: got 0, with which nothing is learned; set it above 0, such as 1e-6",
        "trainer.warmup_steps: got 13, and the run ends after 12 steps, before trainer.learning_rate is reached; "
        "allowed: at most 12",
    ]
    caplog.clear()
    check(basics, tmp_path / "run", "trainer.lora.alpha=4", "trainer.evaluation.interval=2", "trainer.ptx.data=a.jsonl")
    assert caplog.messages == [
        "without effect in supervised fine-tuning: trainer.ptx",
        "trainer.lora.alpha: without effect; set trainer.lora.r, or leave it out",
    ]
    check(basics, tmp_path / "run", "sft.evaluation={}", "trainer.evaluation.interval=2")
    assert caplog.messages[-1] == "trainer.evaluation.interval: without effect; set an evaluation set, or leave it out"
