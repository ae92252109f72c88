"""The interface of a transport on the trainer's side, and the transports: Gloo, NCCL, files, those of packages.

The file transport writes safetensors into a folder that all rollouts share; `docs/weights.md` has the layout. A version
is written once, before `BeginWeightUpdate` is called: generation does not wait for the disk, and a rollout that joins
later reads the same files.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError
from safetensors.torch import save_file

from quartet_common.config import ConfigError
from quartet_common.weights import bucket_file
from quartet_server.plugins import read_parameters
from quartet_server.transports import load_transports
from quartet_trainer.config import WeightsSection
from quartet_trainer.weight_sync.packing import BUFFERS
from quartet_trainer.weight_sync.rollouts import TransferFailed, WeightGroup
from quartet_weights.buckets import view
from quartet_weights.process_group import GroupError, device_of, nccl_version

# Versions kept: the newest, and the one before it, which a rollout may still be reading.
KEPT = 2
PREFIX = "version-"
_PARTS = ("device", "libraries", "invitation", "send", "close")


class Transport(Protocol):
    """A transport's end at the trainer; a package's `trainer_end` returns one."""

    device: torch.device
    """Where its buckets are."""
    libraries: dict[str, str]
    """Versions of libraries, by name, that must be the same at the rollouts."""
    invitation: dict[str, str]
    """What rollouts need to connect, e.g. host and port: `WeightGroupInfo.invitation` at their end."""

    def send(self, group: WeightGroup, buckets: Iterable[torch.Tensor]) -> None:
        """Send each bucket, uint8 on `device`, to all `world_size` - 1 other ranks of `group`.

        A group with another epoch than the last one's has not met yet: connect its ranks, which have its `secret`, and
        drop those of the last one. At most `packing.BUFFERS` buckets are valid at a time: the next overwrites the
        oldest. Call `group.check()` while waiting, which raises at the deadline or if a member is gone. Any error of
        the transport is a failed transfer, after which the next group has another epoch.
        """

    def close(self) -> None:
        """Close all connections: the publisher is closing."""


class Broadcast(Transport):
    """Gloo and NCCL: one broadcast for each bucket; the next is packed while earlier ones are sent and checksummed."""

    def __init__(self, backend: str):
        """`backend`: "gloo" or "nccl"."""
        self.device = device_of(backend)
        self.libraries = {"nccl": nccl_version()} if backend == "nccl" else {}
        self.invitation = {}

    def send(self, group: WeightGroup, buckets: Iterable[torch.Tensor]) -> None:
        assert group.process_group is not None
        try:
            for _ in group.process_group.broadcast(buckets, ahead=BUFFERS, check=group.check):
                pass  # the next bucket overwrites the oldest
        except GroupError as error:
            raise TransferFailed(f"the broadcast failed: {error}") from error

    def close(self) -> None:
        """Does nothing: the publisher closes the group."""


class Files(Transport):
    """The file transport: the publisher calls `write` before Begin, and announces the folder by it."""

    def __init__(self, folder: Path):
        """`folder` is used by this run only, and must be the same path at every rollout."""
        self.device = torch.device("cpu")
        self.libraries, self.invitation = {}, {}
        self._folder = folder.absolute()
        # A restarted trainer may train other weights with the same version number: its folders have other names.
        self._process = secrets.token_hex(4)
        self._written: tuple[int, Path] | None = None

    def write(
        self,
        group: WeightGroup,
        buckets: Iterable[torch.Tensor],
        version: int,
        manifest: rollout_pb2.WeightManifest,
    ) -> Path:
        """Return the folder of a version, which is written first, atomically, unless it is there. Raises
        TransferFailed."""
        if self._written is not None and self._written[0] == version:
            return self._written[1]
        path = self._folder / f"{PREFIX}{version:08d}-{self._process}"
        writing = path.with_name(f".{path.name}.writing")
        tensors = {index: list(each) for index, each in groupby(manifest.tensors, key=lambda tensor: tensor.bucket)}
        try:
            for unfinished in self._folder.glob(f".{PREFIX}*.writing"):
                shutil.rmtree(unfinished, ignore_errors=True)  # of an attempt that failed, or a process that ended
            writing.mkdir(parents=True)
            for index, bucket in enumerate(buckets):
                group.check()
                contents = {tensor.name: view(tensor, bucket) for tensor in tensors.get(index, [])}
                save_file(contents, writing / bucket_file(manifest, index), metadata={"format": "pt"})
            _write_index(writing, manifest)
            writing.rename(path)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise TransferFailed(f"trainer.weights.folder '{self._folder}' cannot be written: {reason}") from error
        others = [other for other in self._folder.glob(f"{PREFIX}*") if other != path]
        others.sort(key=lambda other: other.stat().st_mtime, reverse=True)
        for other in others[KEPT - 1 :]:
            shutil.rmtree(other, ignore_errors=True)  # one that cannot be removed only costs disk space
        self._written = version, path
        return path

    def send(self, group: WeightGroup, buckets: Iterable[torch.Tensor]) -> None:
        """Does nothing: the rollouts read the files."""

    def close(self) -> None:
        """Does nothing: the files stay."""


def _write_index(folder: Path, manifest: rollout_pb2.WeightManifest) -> None:
    """Write the file that Hugging Face's libraries need to read the folder: the shards' index, or PEFT's config."""
    if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
        lora = manifest.lora
        content = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": lora.r,
            "lora_alpha": lora.alpha,
            "target_modules": list(lora.target_modules),
        }
        (folder / "adapter_config.json").write_text(json.dumps(content, indent=2))
    elif len(manifest.bucket_bytes) > 1:
        index = {
            "metadata": {"total_size": sum(manifest.bucket_bytes)},
            "weight_map": {tensor.name: bucket_file(manifest, tensor.bucket) for tensor in manifest.tensors},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def create_transport(settings: WeightsSection, host: str, folder: Path) -> Transport:
    """Return the configured transport.

    Args:
        host: where rollouts reach this trainer.
        folder: for the file transport's versions; it removes old ones there.

    Raises:
        ConfigError: a package is not valid, or its transport cannot work here.
    """
    name = settings.transport
    if name in ("gloo", "nccl"):
        return Broadcast(name)
    if name == "file":
        return Files(folder)
    plugin = load_transports()[name]
    checked = read_parameters(plugin.parameters, settings.transport_parameters, "trainer.weights.transport_parameters")
    try:
        end: Transport = plugin.trainer_end(checked, host, folder)
    except Exception as error:  # a package's code may raise anything
        raise ConfigError(f"trainer.weights.transport: {name} is not possible here: {error}") from error
    if lacking := [part for part in _PARTS if not hasattr(end, part)]:
        gave = type(end).__name__
        raise ConfigError(f"transport '{name}': trainer_end returned a {gave}, which lacks {', '.join(lacking)}")
    return end
