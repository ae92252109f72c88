"""A second build of the services: a copy of the checkout with another version and a new sampling key.

A build is a checkout, from which install.sh installs its services. In an environment of this checkout it is run by its
folders at the front of PYTHONPATH.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quartet_common import __version__
from quartet_common.build import read_build

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("protos", "services/common", *(f"services/{kind}" for kind in ("broker", "reward", "rollout", "trainer")))
_FOLDERS = (*_PACKAGES, "services/environment", "deploy/systemd")
# A sampling parameter that the checkout lacks: in the contract, and in the run file with a default.
_NEW_KEYS = (
    ("protos/quartet/v1/experience.proto", "message SamplingParams {", "  optional float next_key = 1000;"),
    (
        "services/common/quartet_common/sampling.py",
        '    """How completions are drawn; unset keys',
        "    next_key: float = 0.5",
    ),
)


@dataclass(frozen=True)
class Build:
    """A build of the services.

    Attributes:
        name: its name in messages.
        folder: its checkout.
        version: as its services report in the handshake.
    """

    name: str
    folder: Path
    version: str

    def environment(self) -> dict[str, str]:
        """Return the variables with which an environment of this checkout runs the build."""
        packages = [self.folder / ("protos/python" if each == "protos" else each) for each in _PACKAGES]
        return {"PYTHONPATH": "" if self.folder == ROOT else os.pathsep.join(map(str, packages))}


def checkout() -> Build:
    return Build("checkout", ROOT, read_build())


def next_build(folder: Path) -> Build:
    """Copy the checkout's packages into a folder, with a different version."""
    build = Build("next", folder, f"{__version__}+next")
    for name in _FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "tests", "released"))
    module = folder / "services" / "common" / "quartet_common" / "__init__.py"
    module.write_text(module.read_text().replace(f'"{__version__}"', f'"{build.version}"'))
    for name, after, line in _NEW_KEYS:
        _insert(folder / name, after, line)
    generate = folder / "protos" / "generate.sh"
    subprocess.run(["bash", generate, sys.executable, folder / "protos" / "python"], check=True, timeout=120)
    return build


def _insert(file: Path, after: str, line: str) -> None:
    """Insert a line after the one that starts with `after`."""
    lines = file.read_text().splitlines()
    (place,) = [number for number, each in enumerate(lines) if each.startswith(after)]
    file.write_text("\n".join([*lines[: place + 1], line, *lines[place + 1 :], ""]))
