"""What the trainer says of a run file before it starts."""

import dataclasses
import logging
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from learner_helpers import make_batch, make_learner, make_model

from quartet_common.config import ConfigError, load_config
from quartet_trainer.checkpoints import atomic_folder, checkpoint_folder
from quartet_trainer.config import TrainerSection
from quartet_trainer.preflight import preflight

LENGTH = "run.verifiers=[{name='math'}, {name='length'}]"


def check(model_path: Path, tmp_path: Path, *overrides: str, dry_run: bool = False) -> dict[str, Any]:
    basics = [f"model.path={model_path}", f"run.folder={tmp_path}"]
    config = load_config("trainer", TrainerSection, None, [*basics, *overrides])
    return preflight(dataclasses.replace(config, dry_run=dry_run))


@pytest.mark.parametrize(
    ("overrides", "warning"),
    [
        (["run.sampling.top_p=0.9"], "run.sampling: top_p = 0.9 without run.sampling_masks biases every"),
        (["run.sampling.top_p=0.9", "run.sampling_masks=true"], None),
        (
            ["trainer.algorithm=dapo", LENGTH],
            "trainer.algorithm.mask_truncated leaves completions out of the loss that the verifier",
        ),
        (["trainer.algorithm=dapo", "trainer.algorithm.mask_truncated=false", LENGTH], None),
        (["trainer.warmup_steps=6", "run.max_steps=5"], "trainer.warmup_steps: got 6, and the run ends after 5 steps"),
        (["trainer.warmup_steps=5", "run.max_steps=5"], None),
        (["trainer.warmup_steps=6"], None),
        (["trainer.schedule_steps=9"], "trainer.schedule_steps: without effect; set trainer.schedule, or leave it out"),
        (["trainer.schedule_steps=9", "trainer.schedule=linear"], None),
        (
            ["trainer.lora={alpha=8, use_rslora=true}"],
            "trainer.lora.alpha, trainer.lora.use_rslora: without effect; set trainer.lora.r, or leave",
        ),
        (["trainer.ptx.data=rows.jsonl"], "trainer.ptx.data: without effect; set trainer.ptx.coefficient"),
        (
            ["trainer.early_stop.patience=2"],
            "trainer.early_stop.patience: without effect; set trainer.early_stop.metric",
        ),
        (
            ["trainer.weights.folder=w"],
            'trainer.weights.folder: without effect; set trainer.weights.transport = "file"',
        ),
        (
            ["trainer.dynamic_sampling.max_refills=1"],
            "trainer.dynamic_sampling.max_refills: without effect; set trainer",
        ),
        (["trainer.dynamic_sampling.max_refills=1", "trainer.algorithm=dapo"], None),
        (
            ["data.train=a.jsonl", "trainer.evaluation.interval=2"],
            "trainer.evaluation.interval: without effect; set an eval",
        ),
        (["trainer.evaluation.interval=2"], None),
    ],
)
def test_a_combination_that_is_hardly_meant_is_warned_of(
    model_path: Path, tmp_path: Path, caplog, overrides: list[str], warning: str | None
):
    caplog.set_level(logging.WARNING)
    check(model_path, tmp_path, *overrides)
    assert [record.message.startswith(warning or "nothing") for record in caplog.records] == [True] * bool(warning)


@pytest.mark.parametrize(
    ("overrides", "sentences"),
    [
        (["trainer.learning_rat=1"], ["unknown key trainer.learning_rat in --set: did you mean 'learning_rate'?"]),
        (
            ["run.sampling.temperature=0"],
            ["run.sampling.temperature: got 0, at which nothing can be trained; allowed: 1e-06 or above"],
        ),
        (
            ["run.router_replay=true"],
            ["run.router_replay is true; a 'qwen2' model has no experts that its routers choose by top-k scores"],
        ),
        (
            ["run.sampling.repetition_penalty=1.1", "run.sampling.logit_bias={7=2.0}"],
            ["run.sampling.repetition_penalty: got 1.1; the", "run.sampling.logit_bias: got {7: 2.0}; the rollout's"],
        ),
        (["trainer.mini_batches=17"], ["trainer.mini_batches: got 17; allowed: at most run.groups_per_step, 16: each"]),
        (["trainer.interface=eth77"], ["trainer.interface: this host has no network interface 'eth77' with an add"]),
        (["trainer.weights.interface=eth77"], ["trainer.weights.interface: this host has no network interface 'et"]),
    ],
    ids=lambda values: values[0],
)
def test_what_cannot_be_trained_is_refused(
    model_path: Path, tmp_path: Path, overrides: list[str], sentences: list[str]
):
    with pytest.raises(ConfigError) as refusal:
        check(model_path, tmp_path, *overrides)
    for problem, start in zip(refusal.value.problems, sentences, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize(
    ("overrides", "is_known"),
    [
        (["trainer.early_stop.metric=eval/held/reward/math/mean"], True),
        (["trainer.early_stop.metric=eval/held/reward/won/mean"], False),
        (["trainer.early_stop.metric=eval/held/reward/won/mean", "run.environment={name='chess', served=true}"], True),
    ],
)
def test_a_watched_metric_is_of_an_evaluation_or_a_reward_of_the_environment(
    model_path: Path, tmp_path: Path, overrides: list[str], is_known: bool
):
    data = {"train": "train.jsonl", "evaluation": {"held": "held.jsonl"}}
    verifiers = [] if "run.environment" in overrides[-1] else ["run.verifiers=[{name='math'}]"]
    basics = [f"model.path={model_path}", f"run.folder={tmp_path}", "trainer.evaluation.sets=['held']"]
    config = load_config("trainer", TrainerSection, None, [*basics, *verifiers, *overrides])
    with nullcontext() if is_known else pytest.raises(ConfigError, match="early_stop.metric: no evaluation has"):
        preflight(dataclasses.replace(config, data=data))


@pytest.fixture
def free(monkeypatch):
    """Set the free bytes of every file system."""

    def set_to(count: int) -> None:
        usage = SimpleNamespace(total=1 << 40, used=0, free=count)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return set_to


@pytest.mark.parametrize("values", [{"precision": "fp32"}, {"precision": "fp64"}, {"algorithm": "ppo"}], ids=str)
def test_the_size_of_a_checkpoint_is_known_before_there_is_one(tmp_path: Path, free, caplog, values: dict[str, Any]):
    model = make_model(tmp_path / "model", hidden_size=128, intermediate_size=256)
    learner = make_learner(model, max_mean_ratio=0, **values)
    learner.train_step(make_batch())
    learner.snapshot(tmp_path / "step-00000001", {})()
    size = sum(file.stat().st_size for file in (tmp_path / "step-00000001").rglob("*.safetensors"))
    overrides = [f"trainer.{key}={value}" for key, value in ({"precision": "fp64"} | values).items()]
    free(int(0.97 * size))
    with pytest.raises(ConfigError, match="trainer.checkpoint: 0.0 GiB are free at .*; make room, or set"):
        check(model, tmp_path / "run", *overrides)
    for checkpoints, warns in ((1.03, True), (2.97, True), (3.03, False)):
        caplog.clear()
        free(int(checkpoints * size))
        check(model, tmp_path / "run", *overrides)
        assert [("keep_last (2) and one more" in message) for message in caplog.messages] == [True] * warns


def test_a_full_disk_does_not_keep_a_trainer_from_resuming(model_path: Path, tmp_path: Path, free, caplog):
    for step in (1, 2):
        with atomic_folder(checkpoint_folder(tmp_path / "checkpoints", step), {"step": step}) as writing:
            (writing / "weights").write_bytes(bytes(1000))
    free(1000)
    check(model_path, tmp_path)
    assert not caplog.messages
    free(999)
    check(model_path, tmp_path)
    assert ["make room" in message for message in caplog.messages] == [True]


def test_little_shared_memory_is_a_warning_where_there_are_several_ranks(
    model_path: Path, tmp_path: Path, caplog, monkeypatch
):
    usage = SimpleNamespace(total=64 << 20, used=0, free=1 << 40)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check(model_path, tmp_path)
    assert not caplog.messages
    check(model_path, tmp_path, "trainer.ranks=2")
    assert caplog.messages == ["/dev/shm holds 0.06 GiB, too little for several processes or GPUs: --shm-size=8g"]


@pytest.mark.parametrize("key", ["run.folder", "trainer.checkpoint.folder", "trainer.weights.folder"])
def test_each_folder_that_cannot_be_made_is_named_by_its_key(model_path: Path, tmp_path: Path, key: str):
    with pytest.raises(ConfigError) as refusal:
        check(model_path, tmp_path, "trainer.weights.transport=file", f"{key}=/dev/null/here")
    assert refusal.value.problems == (
        f"{key}: '/dev/null/here' cannot be written: '/dev/null' is not a writable folder; name one of this user",
    )


@pytest.mark.parametrize("name", ["checkpoints", "tensorboard", "weights"])
def test_what_is_in_the_way_in_the_run_folder_is_named(model_path: Path, tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"run.folder: '.*/{name}' cannot be written: '.*/{name}' is not a writable"):
        check(model_path, tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="run.folder: cannot write '.*/metrics.jsonl': it is a folder"):
        check(model_path, tmp_path)


@pytest.mark.parametrize("host", ["192.0.2.7", "no-such-host.invalid"])
def test_a_dry_run_refuses_a_store_at_an_address_of_another_host(model_path: Path, tmp_path: Path, host: str):
    setting = f"trainer.weights.store_host={host}"
    with pytest.raises(ConfigError, match=f"trainer.weights.store_host: cannot listen on {host}: "):
        check(model_path, tmp_path, setting, dry_run=True)
    check(model_path, tmp_path, setting)  # a start binds it later: the name may not be published yet


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RANK": "one"}, "RANK: got 'one'; allowed: a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: got 2; allowed: 0 to WORLD_SIZE - 1, 1"),
        ({"WORLD_SIZE": "2"}, "RANK: got None; allowed: 0 to WORLD_SIZE - 1, 1"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "alpha"},
            "MASTER_ADDR, MASTER_PORT: got 'alpha', ''; allowed",
        ),
    ],
    ids=lambda value: str(value),
)
def test_variables_of_no_rank_are_refused(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], sentence: str
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as refusal:
        check(model_path, tmp_path)
    assert [problem[: len(sentence)] for problem in refusal.value.problems] == [sentence]
