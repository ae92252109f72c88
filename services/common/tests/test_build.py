"""The build of a checkout is its version and commit; that of a package is what was written into it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import quartet_common
from quartet_common import __version__

TAG = f"v{__version__}"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a commit of `quartet_common/__init__.py` and `build.py`."""
    package = tmp_path / "quartet_common"
    package.mkdir()
    for name in ("__init__.py", "build.py"):
        shutil.copy(Path(quartet_common.__file__).with_name(name), package)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=first")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def build(folder: Path, **variables: str) -> str:
    command = [sys.executable, "-c", "from quartet_common.build import read_build; print(read_build())"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


def test_build_of_a_checkout_is_version_and_commit_and_whether_files_differ(checkout):
    commit = git(checkout, "rev-parse", "--short=9", "HEAD")
    assert build(checkout) == f"{__version__}+g{commit}"
    with (checkout / "quartet_common" / "__init__.py").open("a") as file:
        file.write("# changed\n")
    assert build(checkout) == f"{__version__}+g{commit}.dirty"


@pytest.mark.skipif(os.geteuid() != 0, reason="the checkout is given to another user: it needs root")
def test_build_of_a_checkout_of_another_user_has_its_commit(checkout):
    commit = git(checkout, "rev-parse", "--short=9", "HEAD")
    for path in (checkout, *checkout.rglob("*")):
        os.chown(path, 12345, 12345)
    assert build(checkout) == f"{__version__}+g{commit}"


def test_build_at_the_tag_of_the_version_is_the_version_and_after_it_is_not(checkout):
    git(checkout, "tag", TAG)
    assert build(checkout) == __version__
    git(checkout, "commit", "--quiet", "--allow-empty", "--message=second")
    assert build(checkout) == f"{__version__}+g{git(checkout, 'rev-parse', '--short=9', 'HEAD')}"


def test_build_without_git_is_of_the_variable_else_the_version(checkout):
    shutil.rmtree(checkout / ".git")
    ceiling = {"GIT_CEILING_DIRECTORIES": str(checkout.parent)}
    assert build(checkout, QUARTET_COMMIT="0123456789abcdef", **ceiling) == f"{__version__}+g012345678"
    assert build(checkout, **ceiling) == __version__


def test_build_of_a_package_is_what_was_written_into_it(checkout):
    (checkout / "quartet_common" / "BUILD").write_text("0.0.9+gabc\n")
    assert build(checkout, QUARTET_COMMIT="0123456789abcdef") == "0.0.9+gabc"
