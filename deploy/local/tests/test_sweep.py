"""`quartet sweep`: the runs of all combinations of values, in turn and side by side, to the end and to Ctrl-C."""

import json
import os
import re
import signal
from pathlib import Path

import fake_nvidia_smi
import pytest

from quartet_common.config import ConfigError
from quartet_common.run_file import RunFile
from quartet_local import sweep as sweeping
from quartet_local.sweep import split_values, variants

pytestmark = pytest.mark.timeout(600)
ENDED = 60
SWEEP = ("sweep",)


@pytest.fixture
def free_file(run_file: Path, tmp_path: Path, monkeypatch) -> Path:
    """The run file without addresses and folder, in the working directory."""
    head, _, rest = run_file.read_text().partition("[addresses]")
    run_file.write_text(re.sub(r"folder = .*\n", f'folder = "{tmp_path}/runs"\n', head) + rest[rest.index("[") :])
    return run_file


def test_side_by_side_a_run_that_fails_is_named_and_the_others_go_on(launch, free_file, tmp_path):
    given = ["trainer.algorithm=nonsense,grpo,rloo", "trainer.learning_rate=1e-3", "trainer.adam_betas=[0.9, 0.99]"]
    words = [word for each in given for word in ("--set", each)]
    launched = launch(free_file, *words, "--parallel", "2", command=SWEEP)
    assert launched.wait(300) == 1, launched.said()
    launched.assert_gone(within=1.0)
    said = launched.said()
    names = [f"launched-algorithm-{name}" for name in ("nonsense", "grpo", "rloo")]
    for name in names[1:]:
        assert f"{name}: run {name} succeeded after 3 steps" in said
        assert RunFile.read(tmp_path / "runs" / name / "run.toml", ()).tree["trainer"]["adam_betas"] == [0.9, 0.99]
    starts = [said.index(f"{name}: quartet run ") for name in names]
    assert starts == sorted(starts) and starts[2] > said.index(f"{names[0]}: quartet: trainer.algorithm: ")
    *_, nonsense, grpo, rloo, failed = said.splitlines()
    assert nonsense.split()[:3] == [names[0], "–", "0"]
    assert grpo.split()[:3] == [names[1], "grpo", "3"] and rloo.split()[:3] == [names[2], "rloo", "3"]
    assert failed.startswith(f"{names[0]} failed: trainer.algorithm: ")


def test_a_dry_run_checks_every_run_and_starts_none(launch, free_file, tmp_path):
    words = ["--set", "trainer.algorithm=nonsense,grpo", "--set", "trainer.learning_rate=-1,1e-3", "--dry-run"]
    launched = launch(free_file, *words, command=SWEEP)
    assert launched.wait(120) == 2, launched.said()
    assert launched.said().count("trainer.algorithm: ") == launched.said().count("trainer.learning_rate: ") == 1
    launched = launch(free_file, "--set", "trainer.algorithm=grpo,rloo", "--dry-run", command=SWEEP)
    assert launched.wait(120) == 0, launched.said()
    runs = json.loads(launched.said())
    assert list(runs) == ["launched-algorithm-grpo", "launched-algorithm-rloo"]
    assert runs["launched-algorithm-rloo"][0] == "trainer.algorithm=rloo"
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_ends_all_runs_of_a_sweep(launch, free_file, tmp_path):
    numbers = (1000000, 2000000, 3000000)
    given = f"run.max_steps={','.join(map(str, numbers))}"
    launched = launch(free_file, "--set", given, "--parallel", "2", command=SWEEP)
    for number in numbers[:2]:
        launched.wait_for_line(f"launched-max_steps-{number}: step 1/", 300)
    os.kill(launched.pid, signal.SIGINT)
    assert launched.wait(ENDED) == 130, launched.said()
    launched.assert_gone(within=1.0)
    assert launched.said().splitlines()[-1].startswith("the sweep goes on with: quartet sweep ")
    assert "Traceback" not in launched.said()
    assert not (tmp_path / "runs" / "launched-max_steps-3000000").exists(), "no run is started any more"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,2e-4", ["1e-4", "2e-4"]),
        ("grpo, rloo", ["grpo", "rloo"]),
        ("[0.9, 0.99],[0.9, 0.95]", ["[0.9, 0.99]", "[0.9, 0.95]"]),
        ('"a, b",c', ['"a, b"', "c"]),
        ('{ a = [1, 2], b = "x,y" },[[1,2],[3]]', ['{ a = [1, 2], b = "x,y" }', "[[1,2],[3]]"]),
        ("", [""]),
    ],
)
def test_a_comma_in_quotes_and_brackets_belongs_to_its_value(text, values):
    assert split_values(text) == values


def test_runs_are_called_after_the_values_that_differ(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[run]\nid = 'mine'\n")
    folder, runs = variants(path, ["trainer.learning_rate=1e-4,2e-4", "run.group_size=4,8", "run.max_steps=3"])
    names = [f"mine-learning_rate-{rate}-group_size-{size}" for rate in ("1e-4", "2e-4") for size in (4, 8)]
    assert list(runs) == names and folder == Path("runs")
    own = {"id": names[3], "folder": f"runs/{names[3]}", "group_size": 8, "max_steps": 3}
    assert RunFile.read(path, runs[names[3]]).tree == {"run": own, "trainer": {"learning_rate": 2e-4}}
    folder, odd = variants(path, ["run.folder=elsewhere", "run.labels.a=x y,x-y," + "z" * 70])
    assert len(odd) == 3 and list(odd)[1] == "mine-a-x-y" and all(len(run_id) <= 64 for run_id in odd)
    assert folder == Path("elsewhere") and 'run.folder="elsewhere/mine-a-x-y"' in odd["mine-a-x-y"]
    assert list(odd) == list(variants(path, ["run.labels.a=x y,x-y," + "z" * 70])[1]), "the same in every start"
    assert list(variants(path, ['run.id="7"'])[1]) == ["7"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (["run.group_size=4,4"], "--set run.group_size=4,4: allowed: each key and each value once"),
        (["run.group_size=4,"], "--set run.group_size=4,: allowed: each key and each value once"),
        (["run.max_steps=4", "run.max_steps=5"], "--set run.max_steps=5: allowed: each key and each value once"),
        (["run.id=a,b"], "--set run.id=a,b: each run's id is made of its values; allowed: one value"),
        (["run.group_size=4,none"], "run.group_size: got 'none'"),
        (["group_size=4,5"], "--set group_size=4: an override is section.key=value"),
        (["trainer.checkpoint.folder=c"], "trainer.checkpoint.folder: the runs of a sweep would share 'c'"),
        (["addresses.broker=localhost:1"], "addresses: runs side by side would share them"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_a_run_starts(tmp_path, given, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        path = tmp_path / "run.toml"
        path.touch()
        variants(path, given, parallel=2)


def test_runs_at_a_time_share_out_the_gpus(tmp_path, monkeypatch):
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch, count=3)
    monkeypatch.setattr("quartet_local.preflight.made_for_gpus", lambda: True)
    assert [slot.get("CUDA_VISIBLE_DEVICES") for slot in sweeping._slots(2)] == ["0,2", "1"]
    assert sweeping._slots(1) == [{}], "one run at a time has them all"
    with pytest.raises(ConfigError, match="--parallel: got 4; allowed: at most 3, the GPUs of this machine"):
        sweeping._slots(4)
