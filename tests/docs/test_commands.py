"""Every shell command of the docs is run here or by the test that its mark names, or its mark says why it is not run.

Commands are run here unchanged, in a temporary folder that looks like a checkout.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from pages import PAGES, ROOT, WRITTEN, blocks, code_spans, name_of

from quartet_client.cli.main import cli

SHELL = [block for page in PAGES for block in blocks(page) if block.info == "sh"]
HERE = [block for block in SHELL if not block.mark]
ENVIRONMENTS = ROOT / ".quartet" / "envs"
PROGRAMS = {"quartet": "client", **{f"quartet-{name}": name for name in ("broker", "reward", "rollout", "trainer")}}
# tests/learning/test_learning.py, tests/hosts/scenario.py and tests/deploy/test_kubernetes.py read their commands from
# the page.
RUN_FROM_THE_PAGE = ("docs/start.md", "docs/hosts.md", "docs/kubernetes.md")
RUN_FILE = """\
[run]
id = "mine"
verifiers = [{ name = "boxed" }]
[model]
path = "model"
[data]
train = "train.jsonl"
"""


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A temporary folder with the contents of a checkout, a run file, prompts and a model folder."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "deploy", "docs", "protos", "tests", "benchmarks", "services", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".quartet").mkdir()
    (folder / ".quartet" / "envs").symlink_to(ENVIRONMENTS)
    (folder / "bin").mkdir()
    for name, environment in PROGRAMS.items():
        (folder / "bin" / name).symlink_to(ENVIRONMENTS / environment / "bin" / name)
    prompts = "".join(json.dumps({"prompt": f"{n}+1=?", "gt_answer": str(n + 1)}) + "\n" for n in range(8))
    logs = folder / "runs" / "arithmetic" / "logs"
    logs.mkdir(parents=True)
    record = {"time": "2026-11-22 08:00:00,123", "level": "WARNING", "message": "returned", "group": "pass-0/17"}
    (logs / "rollout.log").write_text(json.dumps(record) + "\n")
    demo = folder / ".quartet" / "arithmetic"
    demo.mkdir()
    for path in (folder / "train.jsonl", folder / "heldout.jsonl", demo / "train.jsonl", demo / "heldout.jsonl"):
        path.write_text(prompts)
    (demo / "model").mkdir()  # the commands here only check the model, which needs no weights
    (demo / "model" / "tokenizer.json").write_text(
        '{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    (demo / "model" / "config.json").write_text('{"model_type": "qwen2", "max_position_embeddings": 256}')
    (demo / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "model").symlink_to(demo / "model")
    return folder


@pytest.mark.timeout(320)
@pytest.mark.parametrize("block", HERE, ids=str)
def test_commands_without_a_mark_run(block, checkout):
    (checkout / "run.toml").write_text(RUN_FILE)  # an earlier command may have overwritten it
    variables = {**os.environ, "PATH": f"{checkout / 'bin'}:{os.environ.get('PATH', os.defpath)}", "COLUMNS": "200"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=checkout,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{block}\n{block.text}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", [block for block in SHELL if block.mark == "run"], ids=str)
def test_commands_that_are_run_elsewhere_are_named_there(block):
    """The mark names a test file, and files beside it contain the command's main word."""
    path = ROOT / block.says
    assert path.is_file() and path.name.startswith("test_"), block.says
    if name_of(block.page) in RUN_FROM_THE_PAGE:
        return
    beside = "".join(file.read_text() for file in path.parent.glob("*.py"))
    for line in filter(None, map(str.strip, block.text.splitlines())):
        assert (word := main_word(line)) in beside, f"{block}: no {word!r} in {path.parent.name}, for {line!r}"


def main_word(line: str) -> str:
    """Return the subcommand of a `quartet` or `make` command, else the program."""
    programs = [part.split() for part in line.removeprefix("$ ").split("|")]
    words = programs[1] if programs[0][0] == "echo" else programs[0]
    program = words[0].rpartition("/")[2]
    if program in ("quartet", "make"):
        return words[1]
    return program.removeprefix("quartet-")


def commands() -> list[tuple[str, list[str]]]:
    """Return all commands of Quartet and make, in blocks and text: (where, words)."""
    lines = [(str(block), line) for block in SHELL for line in block.text.splitlines()]
    lines += [(name_of(page), span) for page in WRITTEN for span in code_spans(page)]
    found = []
    for where, line in lines:
        for part in re.split(r" \| | && ", line.partition(" #")[0]):
            words = part.removeprefix("$ ").replace("\\|", " ").split()
            if len(words) > 1 and (words[0].rpartition("/")[2] in PROGRAMS or words[0] == "make"):
                found.append((where, [words[0].rpartition("/")[2], *words[1:]]))
    return found


def test_our_commands_have_the_options_that_the_docs_name():
    wrong, looked = [], 0
    service = [ENVIRONMENTS / "trainer" / "bin" / "quartet-trainer", "--help"]  # the others', and --sft
    help_text = subprocess.run(service, capture_output=True, text=True, check=True, timeout=60).stdout
    service_options = set(re.findall(r"--[a-z-]+", help_text))
    for where, words in commands():
        if words[0] == "make":
            missing = words[1] not in MAKE_TARGETS
        elif words[0] == "quartet":
            missing = not quartet_takes(words[1:])
        else:
            missing = not {word.partition("=")[0] for word in words if word.startswith("--")} <= service_options
        looked += 1
        wrong += [f"{where}: {' '.join(words)}"] if missing else []
    assert looked > 60 and not wrong


MAKE_TARGETS = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def quartet_takes(words: list[str]) -> bool:
    """Return whether the `quartet` command has these subcommands and options."""
    command: click.Command = cli
    known = {"--help", "--version"}
    for word in words:
        name = word.strip("[]").partition("=")[0]
        if name.startswith("--"):
            if name not in known | {option for parameter in command.params for option in parameter.opts}:
                return False
        elif isinstance(command, click.Group):
            alternatives = [command.get_command(click.Context(command), one) for one in word.split("|")]
            if None in alternatives:
                return name in ("FILE.toml", "…", "COMMAND")
            command = alternatives[0]
    return True


def test_unrun_commands_state_a_reason():
    assert not [str(block) for block in SHELL if block.mark == "not run" and len(block.says) < 20]
    marked = [block for page in PAGES for block in blocks(page) if block.mark and block.info not in ("sh", "python")]
    assert not marked


def test_a_benchmark_runs_in_its_environment_and_its_figures_become_a_table():
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "texts"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=110).stdout
    assert "| texts: boxes " in printed and "FAILED" not in printed
