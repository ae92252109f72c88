"""A release as it was built: its contract, its wheels, and the calls its own contract tests make (`released/NAME/`)."""

import zipfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from quartet_contract.calls import OWNERS

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


class ReleasedContract:
    """The RPCs and messages of a descriptor image."""

    def __init__(self, image: Path):
        pool = DescriptorPool()
        for file in FileDescriptorSet.FromString(image.read_bytes()).file:
            pool.Add(file)
        services = [pool.FindServiceByName(f"quartet.v1.{name}") for name in (*OWNERS.values(), "HandshakeService")]
        self._requests = {
            f"{service.name}.{rpc.name}": GetMessageClass(rpc.input_type)
            for service in services
            for rpc in service.methods
        }
        self.rpcs = set(self._requests)
        """Names like "BrokerService.CreateRun"."""

    def knows(self, rpc: str, message: Message) -> bool:
        """Return whether a request of today says nothing that this release does not know."""
        seen = self._requests[rpc].FromString(message.SerializeToString())
        seen.DiscardUnknownFields()
        return type(message).FromString(seen.SerializeToString()) == message
