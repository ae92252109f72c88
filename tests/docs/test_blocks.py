"""Code blocks are valid: TOML that the services accept, JSON that is a prompt, Python that compiles and imports."""

import ast
import json
import subprocess
import tomllib

import pytest
import run_file
from pages import PAGES, ROOT, blocks, name_of

from quartet_client.prompts import Prompt

ALL = [block for page in PAGES for block in blocks(page)]
INFOS = {"sh", "text", "toml", "json", "python", "ini", "lua", "proto", "yaml", "js"}
MODELS = ROOT / "docs" / "tools" / "run_file_models.py"


def of(info: str) -> list:
    return [pytest.param(block, id=str(block)) for block in ALL if block.info == info]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_fenced_and_says_what_it_is(page):
    assert not [str(block) for block in blocks(page) if not block.fenced or block.info not in INFOS]


WRONG = {
    "misspelled": {"run": {"group_sise": 8}},
    "out of range": {"trainer": {"learning_rate": -1}},
    "no section": {"trainers": {}},
}


@pytest.fixture(scope="session")
def refused() -> dict[str, str]:
    """The errors of the services and the client for the pages' TOML and for some wrong ones, by block."""
    trees = {str(block): tomllib.loads(block.text) for block in ALL if block.info == "toml"}
    run_files = {where: tree for where, tree in trees.items() if "project" not in tree}
    assert len(run_files) > 5
    return refusals(run_files | WRONG)


def test_toml_blocks_are_what_each_reader_of_a_run_file_takes(refused):
    assert not {where: why for where, why in refused.items() if where not in WRONG}


def test_what_is_wrong_with_toml_is_seen(refused):
    assert refused.keys() >= WRONG.keys() and "did you mean 'group_size'" in refused["misspelled"]


def refusals(run_files: dict[str, dict]) -> dict[str, str]:
    """Check run files with each reader in its own environment; return the errors of the rejected ones."""
    found = {where: "unknown section" for where, tree in run_files.items() if not tree.keys() <= set(run_file.ORDER)}
    processes = [
        subprocess.Popen(
            [ROOT / ".quartet" / "envs" / reader / "bin" / "python", MODELS, reader, "--check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for reader in run_file.READERS
    ]
    for process in processes:
        answer, _ = process.communicate(json.dumps(list(run_files.values())), timeout=100)
        assert process.returncode == 0
        found |= {where: why for where, why in zip(run_files, json.loads(answer), strict=True) if why}
    return found


@pytest.mark.parametrize("block", of("python"))
def test_python_compiles_and_imports_what_is_there(block):
    tree = ast.parse(block.text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    packages = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0] for node in imports
    }
    owner = next((name for name in run_file.READERS if f"quartet_{name}" in packages), "dev")
    program = "\n".join(ast.unparse(node) for node in imports)
    python = ROOT / ".quartet" / "envs" / owner / "bin" / "python"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", of("json"))
def test_json_lines_are_prompts_that_the_client_takes(block):
    for number, line in enumerate(block.text.splitlines(), start=1):
        assert Prompt.parse(json.loads(line), f"{block}+{number}").has_reference
