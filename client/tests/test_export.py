"""`quartet export`: a model's folder with a card of its run, and the same at the hub, against a server with its API."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")

sys.path.append(str(Path(__file__).parents[2] / "tests" / "hub"))
from hub_server import TOKEN, HubServer  # noqa: E402

RUN_FILE = """
[run]
id = "mine"
group_size = 8
groups_per_step = 4
verifiers = [{ name = "boxed" }, { file = "/home/me/reward.py:close" }]
[model]
path = "Qwen/Qwen2.5-3B"
[data]
train = { dataset = "openai/gsm8k", name = "main" }
[trainer]
algorithm = "grpo"
learning_rate = 1e-6
"""
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"\x08" + bytes(40)}


@pytest.fixture
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture
def run(tmp_path):
    """The folder of a run of two steps, with its final model and a checkpoint after the first."""
    folder = tmp_path / "mine"
    for place in (folder / "model", folder / "checkpoints" / "step-00000001" / "model"):
        place.mkdir(parents=True)
        for name, content in FILES.items():
            (place / name).write_bytes(content)
    (folder / "run.toml").write_text(RUN_FILE)
    manifest = {"step": 1, "files": {f"model/{name}": len(content) for name, content in FILES.items()}}
    (place.parent / "manifest.json").write_text(json.dumps(manifest))
    rows = [{"kind": "step", "step": step, "time": float(step), "reward/mean": 0.5} for step in range(2)]
    for version, right in ((0, 0.25), (1, 0.5), (2, 0.75)):
        figures = {"ans_acc": right, "ans_acc_low": 0.1, "ans_acc_high": 0.9, "judged": 8.0}
        metrics = {f"eval/heldout/{name}": value for name, value in figures.items()}
        rows.append({"kind": "evaluation", "set": "heldout", "policy_version": version, **metrics})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def export(hub, tmp_path):
    """Call the command in a process of its own; return its exit status and what it says."""

    def call(*arguments: object, **variables: str) -> tuple[int, str]:
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "HF_TOKEN": TOKEN, **variables}
        command = [sys.executable, "-m", "quartet_client", "export", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, (done.stdout + done.stderr).strip()

    return call


def test_a_folder_has_the_model_and_a_card_of_the_runs_facts(export, run, tmp_path):
    status, said = export(run, "--to", tmp_path / "out")
    assert status == 0, said
    card = (tmp_path / "out" / "README.md").read_text()
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.name != "README.md"} == FILES
    header = [
        'base_model: "Qwen/Qwen2.5-3B"',
        'datasets: ["openai/gsm8k"]',
        'tags: ["quartet", "reinforcement-learning", "grpo"]',
    ]
    assert card.split("---")[1].strip().splitlines()[2:] == header
    assert "# mine\n" in card and "| optimizer steps | 2 |" in card and "| rewards | boxed, reward.py:close |" in card
    assert "| completions per step | 4 prompts × 8 |" in card and "/home" not in card
    accuracy = "{} (95%: 10.0% to 90.0%, n = 8) at version {}"
    assert f"| heldout | {accuracy.format('25.0%', 0)} | {accuracy.format('75.0%', 2)} |" in card
    status, said = export(run / "checkpoints" / "step-00000001", "--to", tmp_path / "first")
    card = (tmp_path / "first" / "README.md").read_text()
    assert status == 0 and "| optimizer steps | 1 |" in card and "at version 2" not in card
    assert export(run, "--to", tmp_path / "out")[1].endswith("exists; allowed: a folder that is not there yet")
    assert "holds no model; allowed: a complete checkpoint" in export(run / "checkpoints", "--to", tmp_path / "none")[1]


def test_the_hub_gets_all_files_in_one_commit_on_a_branch_of_a_private_model(export, run, hub):
    status, said = export(run, "--push", "own/mine", "--private", "--revision", "v1")
    assert status == 0, said
    repo = hub.repos["models", "own/mine"]
    pushed = repo.commits[repo.refs["v1"]]
    assert repo.private and pushed.pop("README.md").startswith(b"---\nlibrary_name") and pushed == FILES
    assert repo.commits[repo.refs["main"]] == {} and list(hub.large.values()) == [FILES["model.safetensors"]]
    assert sum("/commit/" in request for request in hub.requests) == 1
    status, said = export(run, "--push", "own/mine")
    assert status == 0 and said.startswith(f"{hub.address}/own/mine/commit/"), said
    assert repo.commits[repo.refs["main"]].keys() == {*FILES, "README.md"}


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["--push", "own/mine"], {"HF_TOKEN": ""}, "quartet: --push: there is no token for {hub}; set HF_TOKEN"),
        (["--push", "others/mine"], {}, "{hub} does not let this token write to 'others/mine' (HTTP 403)"),
        (["--push", "mine"], {}, "--push: got 'mine'; allowed: the owner and the name of a model at the hub, ORG/NAME"),
        (["--push", "own/public", "--private"], {}, "--private: 'own/public' is there, and public; make it private"),
        (["--push", "own/mine"], {"HF_HUB_OFFLINE": "1"}, "did not take the files of 'own/mine' (OfflineModeIsEnabled"),
    ],
)
def test_what_cannot_be_pushed_is_one_sentence_and_nothing_is_at_the_hub(export, run, hub, arguments, variables, words):
    hub.add("models", "own/public", {})
    status, said = export(run, *arguments, **variables)
    assert status == 2 and words.format(hub=hub.address) in said, said
    assert sum("quartet: " in line for line in said.splitlines()) <= 1 and "Traceback" not in said
    assert list(hub.repos) == [("models", "own/public")] and hub.large == {}
