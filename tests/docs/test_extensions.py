"""The extensions of docs/extend.md, installed as a package and tested in the environments of their services."""

import os
import subprocess
from pathlib import Path

import pytest
from pages import ROOT
from preloaded import Pythons, install_extensions

pytestmark = pytest.mark.timeout(400)
PACKAGE = ROOT / "examples" / "extensions"
# One process per service, because importing torch takes most of the time.
KINDS_OF = {"reward": ("verifier",), "rollout": ("environment", "engine", "transport"), "trainer": ("algorithm",)}


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    return install_extensions(tmp_path_factory.mktemp("extensions"))


def test_every_extension_is_tested():
    kinds = {path.stem.removeprefix("test_") for path in (PACKAGE / "tests").glob("test_*.py")}
    assert kinds == {kind for kinds in KINDS_OF.values() for kind in kinds}


@pytest.mark.parametrize("service", KINDS_OF)
def test_extensions_pass_their_own_tests_in_their_services_environment(service, installed):
    pythons = Pythons()
    tests = [PACKAGE / "tests" / f"test_{kind}.py" for kind in KINDS_OF[service]]
    done = subprocess.run(
        [pythons[service], "-m", "pytest", "-c", ROOT / "pyproject.toml", "-q", "-p", "no:cacheprovider", *tests],
        env={**os.environ, "PYTHONPATH": str(installed)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    pythons.close()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
