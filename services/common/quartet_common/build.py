"""The build that runs: its version and its commit. The packages take their version from here (`pyproject.toml`)."""

import os
import subprocess
from functools import cache
from pathlib import Path

from quartet_common import __version__

BUILD_FILE = Path(__file__).with_name("BUILD")
"""In a wheel or sdist: the build, written when it was made (`hatch_build.py`)."""


@cache
def read_build() -> str:
    """Return the build, a version of PEP 440: "0.1.0" of a release, else "0.1.0+gCOMMIT", or "0.1.0+gCOMMIT.dirty".

    Of an installed package it is what was built; of a checkout what git says, or the variable QUARTET_COMMIT where
    there is no git, as in a container's build; else the version alone.
    """
    if BUILD_FILE.is_file():
        return BUILD_FILE.read_text().strip()
    commit = os.environ.get("QUARTET_COMMIT", "")[:9] or _describe()
    return f"{__version__}+g{commit}" if commit else __version__


def _describe() -> str:
    """Return "COMMIT" of this checkout, or "COMMIT.dirty" if files differ; "" at the version's tag or without git."""
    tag = f"v{__version__}"
    # Of whoever owns the checkout: its code runs already.
    git = ("git", "-c", "safe.directory=*", "describe")
    command = (*git, "--tags", f"--match={tag}", "--always", "--long", "--abbrev=9", "--dirty=.dirty")
    folder = Path(__file__).parent
    try:
        answer = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    *nearest, commit = answer.strip().rsplit("-", 2)
    released = nearest == [tag, "0"] and not commit.endswith(".dirty")
    return "" if released else commit.removeprefix("g")
