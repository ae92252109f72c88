"""`quartet export`: a model's folder with a card of its run, and the same at the hub, against a server with its API."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("huggingface_hub")

sys.path.append(str(Path(__file__).parents[2] / "tests" / "hub"))
from hub_server import TOKEN, HubServer  # noqa: E402

from quartet_client.cli.main import main  # noqa: E402

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
def export(capsys):
    """Call the command; return its exit status and what it says."""

    def call(*arguments: object) -> tuple[int, str]:
        return main(["export", *map(str, arguments)]), "".join(capsys.readouterr()).strip()

    return call


@pytest.fixture
def push(hub, run, tmp_path):
    """Push the run in a process of its own, as huggingface_hub reads variables at imports; the same of each push."""

    def call(*pushes: list[str], **variables: str) -> list[tuple[int, str]]:
        program = (
            "import json, sys, contextlib, io\nfrom quartet_client.cli.main import main\n"
            "for arguments in json.loads(sys.argv[1]):\n    said = io.StringIO()\n"
            "    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):\n"
            "        status = main(arguments)\n"
            "    print(json.dumps([status, said.getvalue().strip()]))\n"
        )
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "HF_TOKEN": TOKEN, **variables}
        given = json.dumps([["export", str(run), "--push", *each] for each in pushes])
        command = [sys.executable, "-c", program, given]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]

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
    table = RUN_FILE.replace('algorithm = "grpo"', 'algorithm = { name = "rloo", clip_high = 0.3 }')
    (run / "run.toml").write_text(table)
    status, said = export(run / "checkpoints" / "step-00000001", "--to", tmp_path / "first")
    card = (tmp_path / "first" / "README.md").read_text()
    assert status == 0 and '"rloo"]' in card and "| algorithm | rloo |" in card and "| optimizer steps | 1 |" in card
    assert "at version 2" not in card
    assert export(run, "--to", tmp_path / "out")[1].endswith("exists; allowed: a folder that is not there yet")
    assert "cannot write '/proc/x': " in export(run, "--to", "/proc/x")[1]
    (run / "model" / "vocab.json").symlink_to("gone")  # cannot be copied
    status, said = export(run, "--to", tmp_path / "part")
    assert status == 2 and "cannot write" in said and not (tmp_path / "part").exists()
    assert "holds no model; allowed: a complete checkpoint" in export(run / "checkpoints", "--to", tmp_path / "none")[1]


@pytest.mark.parametrize(
    ("given", "rewards"),
    [
        ('"boxed"', "boxed"),
        ('["boxed", "/home/me/reward.py:close"]', "boxed, reward.py:close"),
        ('{ name = "/home/me/reward.py:close" }', "reward.py:close"),
    ],
)
def test_a_card_names_rewards_in_each_form_of_a_run_file(export, run, tmp_path, given, rewards):
    lines = [f"verifiers = {given}" if line.startswith("verifiers") else line for line in RUN_FILE.splitlines()]
    (run / "run.toml").write_text("\n".join(lines))
    status, said = export(run, "--to", tmp_path / "out")
    assert status == 0, said
    assert f"| rewards | {rewards} |" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize(("dtype", "held"), [("bfloat16", "F32"), ("float16", "F32"), ("bfloat16", "F64")])
def test_a_checkpoints_weights_are_exported_in_the_dtype_of_its_config(export, run, tmp_path, dtype, held):
    model = run / "checkpoints" / "step-00000001" / "model"
    # Near and far from bf16's numbers, ties to the even one below and above, the largest, infinity, no number.
    values = [1.0, 1.00390625, 1.01171875, 1.0039064, -3.14159, 1e-30, 6e4, float("inf"), float("nan")]
    wide = np.array(values, "<f8" if held == "F64" else "<f4").tobytes()
    header = json.dumps(
        {"a": {"dtype": held, "shape": [3, 3], "data_offsets": [0, len(wide)]}, "__metadata__": {"format": "pt"}}
    ).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + wide)
    (model / "config.json").write_text(json.dumps({"dtype": dtype}))
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    manifest = {"step": 1, "files": {"model/config.json": (model / "config.json").stat().st_size}}
    (model.parent / "manifest.json").write_text(json.dumps(manifest))
    status, said = export(model.parent, "--to", tmp_path / "out")
    assert status == 0, said
    content = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    code = {"bfloat16": "BF16", "float16": "F16"}[dtype]
    assert json.loads(content[8 : 8 + length])["a"] == {"dtype": code, "shape": [3, 3], "data_offsets": [0, 18]}
    expected = {  # as torch rounds them: torch.tensor(values).to(dtype).view(torch.uint16)
        "BF16": [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC049, 0x0DA2, 0x476A, 0x7F80, 0x7FC0],
        "F16": [0x3C00, 0x3C04, 0x3C0C, 0x3C04, 0xC248, 0x0000, 0x7B53, 0x7C00, 0x7E00],
    }[code]
    assert np.frombuffer(content[8 + length :], "<u2").tolist() == expected
    assert (tmp_path / "out" / "additional_chat_templates" / "tool_use.jinja").is_file()


def test_a_run_file_that_only_lies_above_a_model_is_not_its_run_s(export, run, tmp_path):
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (run / "run.toml").write_text("[run")
    status, said = export(run / "checkpoints" / "step-00000001", "--to", tmp_path / "broken")
    assert status == 2 and said.startswith(f"quartet: run file '{run}/run.toml' is not valid TOML: ")
    (run / "model").rename(tmp_path / "other")
    status, said = export(tmp_path / "other", "--to", tmp_path / "out")
    assert status == 0 and "Qwen" not in (tmp_path / "out" / "README.md").read_text()


def test_the_hub_gets_all_files_in_one_commit_on_a_branch_of_a_private_model(push, hub):
    (status, said), again = push(["own/mine", "--private", "--revision", "v1"], ["own/mine"])
    assert status == 0, said
    repo = hub.repos["models", "own/mine"]
    pushed = dict(repo.commits[repo.refs["v1"]])
    assert repo.private and pushed.pop("README.md").startswith(b"---\nlibrary_name") and pushed == FILES
    assert list(hub.large.values()) == [FILES["model.safetensors"]]
    commits = [request for request in hub.requests if "/commit/" in request]
    assert commits == [f"POST /api/models/own/mine/commit/{branch}" for branch in ("v1", "main")]
    assert again[0] == 0 and again[1].startswith(f"{hub.address}/own/mine/commit/"), again
    assert repo.commits[repo.refs["main"]].keys() == {*FILES, "README.md"}


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"HF_TOKEN": ""}, {("own/mine",): "quartet: --push: there is no token for {hub}; set HF_TOKEN"}),
        ({"HF_HUB_OFFLINE": "1"}, {("own/mine",): "did not take the files of 'own/mine' (OfflineModeIsEnabled"}),
        (
            {},
            {
                ("others/mine",): "{hub} does not let this token write to 'others/mine' (HTTP 403)",
                ("mine",): "--push: got 'mine'; allowed: the owner and the name of a model at the hub, ORG/NAME",
                ("own/public", "--private"): "--private: 'own/public' is there, and public; make it private",
            },
        ),
    ],
)
def test_what_cannot_be_pushed_is_one_sentence_and_nothing_is_at_the_hub(push, hub, variables, refused):
    hub.add("models", "own/public", {})
    for (status, said), words in zip(push(*refused, **variables), refused.values(), strict=True):
        assert status == 2 and words.format(hub=hub.address) in said, said
        assert sum("quartet: " in line for line in said.splitlines()) <= 1 and "Traceback" not in said
    assert list(hub.repos) == [("models", "own/public")] and hub.large == {}
