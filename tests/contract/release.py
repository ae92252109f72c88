"""A release as it was built: its wheels, and the calls its own contract tests make (`released/NAME/`)."""

import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "released"
RELEASES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
"""Their names are those of the contracts: "v1.0"."""


def unpack(name: str, folder: Path, calls: bool = False) -> dict[str, str]:
    """Unpack a release, with its calls if asked for; return the variables that make a Python run it."""
    archives = [*sorted((FOLDER / name).glob("*.whl")), *([FOLDER / name / "calls.zip"] if calls else [])]
    for archive in archives:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)
    return {"PYTHONPATH": str(folder)}
