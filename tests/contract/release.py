"""A release as it was built: its contract, its wheels, and the calls its own contract tests make (`released/NAME/`)."""

import zipfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet

FOLDER = Path(__file__).resolve().parent / "released"
RELEASES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
"""Their names are those of the contracts: "v1.0"."""
IMAGES = sorted((FOLDER.parents[2] / "protos" / "released").glob("*.binpb"))
"""The released descriptor images, oldest first."""


def unpack(name: str, folder: Path, calls: bool = False) -> dict[str, str]:
    """Unpack a release, with its calls if asked for; return the variables that make a Python run it."""
    archives = [*sorted((FOLDER / name).glob("*.whl")), *([FOLDER / name / "calls.zip"] if calls else [])]
    for archive in archives:
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder)
    return {"PYTHONPATH": str(folder)}


def rpcs_of(image: Path) -> set[str]:
    """Return the RPCs of a descriptor image, by names like "BrokerService.CreateRun"."""
    files = FileDescriptorSet.FromString(image.read_bytes()).file
    return {f"{service.name}.{rpc.name}" for file in files for service in file.service for rpc in service.method}
