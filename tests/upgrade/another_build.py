"""A second build of the services: a copy of the checkout with another version and a new sampling key.

A build is a folder at the front of PYTHONPATH in the service's own environment: what a package or image would contain,
without the dependencies.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from quartet_common import __version__
from quartet_common.build import read_build

ROOT = Path(__file__).resolve().parents[2]
_SOURCES = (
    "protos/python/quartet",
    "services/common/quartet_common",
    "services/common/quartet_server",
    "services/common/quartet_weights",
    *(f"services/{kind}/quartet_{kind}" for kind in ("broker", "reward", "rollout", "trainer")),
)
# A sampling parameter that the checkout lacks: in the contract, and in the run file with a default.
_NEW_KEYS = (
    ("protos/quartet/v1/experience.proto", "message SamplingParams {", "  optional float next_key = 1000;"),
    ("quartet_common/sampling.py", '    """How completions are drawn; unset keys', "    next_key: float = 0.5"),
)


@dataclass(frozen=True)
class Build:
    """A build of the services.

    Attributes:
        name: its name in messages.
        folder: with the packages; None: the checkout itself.
        version: as its services report in the handshake.
    """

    name: str
    folder: Path | None
    version: str

    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.folder) if self.folder else ""}


def checkout() -> Build:
    return Build("checkout", None, read_build())


def next_build(folder: Path) -> Build:
    """Copy the checkout's packages into a folder, with a different version."""
    build = Build("next", folder, f"{__version__}+next")
    for source in _SOURCES:
        target = folder / Path(source).name
        shutil.copytree(ROOT / source, target, ignore=shutil.ignore_patterns("__pycache__"))
        module = target / "__init__.py"
        if module.exists():
            module.write_text(module.read_text().replace(f'"{__version__}"', f'"{build.version}"'))
    shutil.copytree(ROOT / "protos" / "quartet", folder / "protos" / "quartet")
    shutil.copy(ROOT / "protos" / "generate.sh", folder / "protos")
    for name, after, line in _NEW_KEYS:
        _insert(folder / name, after, line)
    subprocess.run(["bash", folder / "protos" / "generate.sh", sys.executable, folder], check=True, timeout=120)
    return build


def _insert(file: Path, after: str, line: str) -> None:
    """Insert a line after the one that starts with `after`."""
    lines = file.read_text().splitlines()
    (place,) = [number for number, each in enumerate(lines) if each.startswith(after)]
    file.write_text("\n".join([*lines[: place + 1], line, *lines[place + 1 :], ""]))
