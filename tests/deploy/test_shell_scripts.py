"""All shell scripts of the checkout pass shellcheck."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IGNORED = {".git", ".quartet", "node_modules"}


def shell_scripts() -> list[str]:
    """Return the files whose first line names a shell."""
    files = [
        each
        for top in ROOT.iterdir()
        if top.name not in IGNORED
        for each in (top.rglob("*") if top.is_dir() else [top])
    ]
    return sorted(str(each.relative_to(ROOT)) for each in files if each.is_file() and _is_shell(each))


def _is_shell(file: Path) -> bool:
    with file.open("rb") as opened:
        return bool(re.match(rb"#!.*\b(ba|da)?sh\b", opened.readline(100)))


@pytest.mark.parametrize("script", shell_scripts())
def test_shellcheck_finds_nothing(script):
    shellcheck = Path(sys.executable).with_name("shellcheck")
    answer = subprocess.run([shellcheck, script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stdout) == (0, "")


def test_installer_is_among_the_scripts():
    assert {"deploy/systemd/install.sh", "deploy/containers/check.sh", "protos/generate.sh"} <= set(shell_scripts())
