"""Packages that no environment may have, and completeness of the pins. (tests/imports.py checks imports.)"""

import json
import re
import subprocess

import pytest
from by_hand import ENVIRONMENTS, ROOT

SERVICES = ("broker", "reward", "rollout", "trainer")
PACKAGES = {
    "common": ROOT / "services/common/quartet_common",
    "server": ROOT / "services/common/quartet_server",
    "weights": ROOT / "services/common/quartet_weights",
    **{name: ROOT / f"services/{name}/quartet_{name}" for name in SERVICES},
    "client": ROOT / "client/quartet_client",
}
PIN = re.compile(r"^([A-Za-z0-9._-]+)==", re.MULTILINE)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_unpickled(package):
    for file in PACKAGES[package].rglob("*.py"):
        text = file.read_text()
        assert not any(call in text for call in ("torch.load(", "gather_object(", "object_list(")), file


# Run in an environment: prints every installed package with its requirements, without extras.
REQUIRED = """
import importlib.metadata as m, json, re
def names(requires): return [re.match("[A-Za-z0-9._-]+", each)[0] for each in requires if "extra ==" not in each]
print(json.dumps({d.metadata["Name"]: names(d.requires or ()) for d in m.distributions()}))
"""


@pytest.mark.parametrize("environment", ["broker", "reward", "rollout", "trainer", "client"])
def test_a_pinned_closure_is_whole(environment):
    """Installed requirements of pinned packages are pinned, except those of torch, which differ by build."""
    python = ENVIRONMENTS / environment / "bin" / "python"
    done = subprocess.run([python, "-c", REQUIRED], capture_output=True, text=True, timeout=60, check=True)
    required = {normal(name): set(map(normal, needs)) for name, needs in json.loads(done.stdout).items()}
    file = (ROOT / "client" if environment == "client" else ROOT / "services" / environment) / "requirements.txt"
    pinned = set(map(normal, PIN.findall(file.read_text())))
    needed = set().union(*(required[name] for name in (pinned - {"torch"}) & required.keys()))
    assert needed and not (needed & required.keys()) - pinned


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
