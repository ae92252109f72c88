"""The rules of the house that a machine can check: who may import what, and what no environment may hold."""

import re
import subprocess
from pathlib import Path

import pytest
from by_hand import ENVIRONMENTS, ROOT

SERVICES = ("broker", "reward", "rollout", "trainer")
PACKAGES = {
    "common": ROOT / "services/common/quartet_common",
    **{name: ROOT / f"services/{name}/quartet_{name}" for name in SERVICES},
    "client": ROOT / "client/quartet_client",
}
IMPORT = re.compile(r"^\s*(?:from|import)\s+([\w.]+)", re.MULTILINE)


def imports(folder: Path) -> set[str]:
    return {name for file in folder.rglob("*.py") for name in IMPORT.findall(file.read_text())}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_a_service_that_is_not_itself(package):
    others = {f"quartet_{name}" for name in SERVICES if name != package}
    assert not {name for name in imports(PACKAGES[package]) if name.split(".")[0] in others}


COMPUTING = {"torch", "transformers", "vllm"}


@pytest.mark.parametrize("package", ["common", "broker", "reward", "client"])
def test_torch_stays_out_of_packages_that_do_not_compute(package):
    folder = PACKAGES[package]
    importers = {
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        if COMPUTING & {name.split(".")[0] for name in IMPORT.findall(file.read_text())}
    }
    # The learned reward model is an extra: its worker is a process of its own, and no module imports it.
    assert importers <= ({"reward_model/worker.py"} if package == "reward" else set())
    assert "quartet_reward.reward_model.worker" not in imports(folder)


@pytest.mark.parametrize("environment", ["broker", "reward", "client"])
def test_torch_stays_out_of_their_environments(environment):
    python = ENVIRONMENTS / environment / "bin" / "python"
    done = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, timeout=60, check=False)
    assert "No module named 'torch'" in done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_pickled_and_nothing_needs_ray(package):
    assert not {name for name in imports(PACKAGES[package]) if name.split(".")[0] in ("pickle", "cloudpickle", "ray")}
    for file in PACKAGES[package].rglob("*.py"):
        assert "torch.load(" not in file.read_text(), file
