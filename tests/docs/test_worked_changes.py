"""CONTRIBUTING's worked changes list the files that they take: those in which the name that was added stands."""

import re
import subprocess

import pytest
from pages import ROOT

MOST = {"frequency_penalty": 8}
"""By what was added: the most files that it may take, tests and docs included."""


@pytest.mark.parametrize("name", MOST)
def test_a_worked_change_takes_the_files_that_it_lists(name: str) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = re.findall(
        r"^(\S+?)(?:  .*)?$", re.split(r"```(?:text)?\n", text.partition(f"`{name}` took")[2])[1], re.MULTILINE
    )
    command = ["git", "grep", "-l", name, "--", ".", ":!CONTRIBUTING.md", ":!tests/docs/test_worked_changes.py"]
    takes = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert sorted(listed) == sorted(takes) and len(takes) <= MOST[name]
