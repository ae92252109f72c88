"""CONTRIBUTING's worked changes touch the files that it lists, and no more than their limits.

Each is a patch of the handwritten part, in `worked_changes`. In a copy of the checkout the patch is applied and the
generators are run: the changed files must be those listed, and a test of the change must pass. Recreate a patch whose
context has changed by hand: apply, edit, `git diff -U1`.
"""

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pages import ROOT
from preloaded import Pythons

pytestmark = pytest.mark.timeout(600)
PATCHES = Path(__file__).with_name("worked_changes")
PYTHON = ROOT / ".quartet" / "envs"


@dataclass(frozen=True)
class Change:
    """A worked change: its heading in CONTRIBUTING, its maximal number of files, and the test that it passes."""

    heading: str
    most: int
    environment: str
    test: tuple[str, ...]


CHANGES = {
    "sampling_parameter": Change(
        "A sampling parameter", 7, "dev", ("services/common/tests/test_sampling.py", "-k", "thinking_token_budget")
    ),
    "algorithm": Change(
        "An algorithm",
        3,
        "trainer",
        ("services/trainer/tests/learner/test_algorithms.py", "-k", "raft"),
    ),
    "environment": Change("An environment", 4, "rollout", ("services/rollout/tests/service/test_second_look.py",)),
    "command": Change("A command", 4, "client", ("client/tests/test_terminal.py", "-k", "members or each_command")),
    "broker_metric": Change(
        "A broker metric", 3, "broker", ("services/broker/tests/test_runs.py", "-k", "no_metric_is_left and True")
    ),
    "verifier": Change(
        "A verifier", 2, "reward", ("services/reward/tests/test_verifiers.py", "-k", "docstring_shows and contains")
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, including uncommitted changes, in its own repository."""
    folder = tmp_path_factory.mktemp("copy")
    for name in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".quartet").symlink_to(ROOT / ".quartet")
    git(folder, "init", "--quiet")
    (folder / ".git" / "info" / "exclude").write_text(".quartet\n")
    git(folder, "add", "--all")
    return folder


@pytest.fixture(scope="module")
def pythons() -> Iterator[Pythons]:
    with contextlib.closing(Pythons()) as made:
        yield made


@pytest.mark.parametrize("name", CHANGES)
def test_a_worked_change_takes_the_files_that_it_lists(copy: Path, pythons: Pythons, name: str) -> None:
    change, dev = CHANGES[name], PYTHON / "dev" / "bin" / "python"
    git(copy, "apply", str(PATCHES / f"{name}.patch"))
    try:
        if "protos/" in (PATCHES / f"{name}.patch").read_text():
            run(copy, "bash", "protos/generate.sh", dev)
        run(copy, dev, "docs/tools/write.py")
        pytest_here = ["-m", "pytest", "-c", "pyproject.toml", "-q", "-p", "no:cacheprovider"]
        run(copy, pythons.libraries(change.environment), *pytest_here, *change.test)
        takes = {
            *git(copy, "diff", "--name-only").split(),
            *git(copy, "ls-files", "--others", "--exclude-standard").split(),
        }
    finally:
        git(copy, "checkout", "--quiet", "--", ".")
        git(copy, "clean", "--quiet", "-fd")
    assert sorted(listed(change.heading)) == sorted(takes)
    assert len(listed(change.heading)) <= change.most


def listed(heading: str) -> list[str]:
    """The files of the list below a heading of CONTRIBUTING."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(f"### {heading}\n")[2]
    return re.findall(r"^(\S+)", text.partition("```text\n")[2].partition("```")[0], re.MULTILINE)


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(folder: Path, *command: Path | str) -> None:
    """Run a program on the copy's packages."""
    packages = ("protos/python", "client", "deploy/local", *(f"services/{each}" for each in SERVICES))
    path = os.pathsep.join(str(folder / each) for each in packages)
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


SERVICES = ("common", "broker", "reward", "rollout", "trainer")
