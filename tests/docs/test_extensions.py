"""The extensions of docs/extend.md, installed as a package and tested in the environments of their services."""

import os
import subprocess
from pathlib import Path

import pytest
from pages import ROOT

PACKAGE = ROOT / "examples" / "extensions"
SERVICE_OF = {"verifier": "reward", "environment": "rollout", "engine": "rollout", "algorithm": "trainer"}


@pytest.fixture(scope="session")
def installed(tmp_path_factory) -> Path:
    """A folder with the package as an installer leaves it, built from a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("extensions")
    subprocess.run(["cp", "-r", PACKAGE, folder / "source"], check=True, timeout=60)
    uv = ROOT / ".quartet" / "tools" / "bin" / "uv"
    python = ROOT / ".quartet" / "envs" / "dev" / "bin" / "python"
    command = [uv, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation", "--python", python]
    subprocess.run([*command, "--target", folder / "site", folder / "source"], check=True, timeout=100)
    return folder / "site"


@pytest.mark.parametrize("kind", SERVICE_OF)
def test_an_extension_passes_its_own_tests_in_its_services_environment(kind, installed):
    python = ROOT / ".quartet" / "envs" / SERVICE_OF[kind] / "bin" / "python"
    test = PACKAGE / "tests" / f"test_{kind}.py"
    done = subprocess.run(
        [python, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-q", "-p", "no:cacheprovider", test],
        env={**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
