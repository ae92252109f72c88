"""The interface of a transport on the trainer's side, the file transport, and the loading of packages' transports.

The file transport writes safetensors into a folder that all rollouts share; `docs/weights.md` has the layout. A version
is written once, before `BeginWeightUpdate` is called: generation does not wait for the disk, and a rollout that joins
later reads the same files. `process_group` has Gloo and NCCL.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError
from safetensors.torch import save_file

from quartet_common.config import ConfigError
from quartet_common.weights import bucket_file
from quartet_server.plugins import read_parameters
from quartet_server.transports import load_transports
from quartet_weights.buckets import view

# Versions kept: the newest, and the one before it, which a rollout may still be reading.
KEPT = 2
PREFIX = "version-"
_PARTS = ("device", "libraries", "invite", "meet", "close")


class TransferFailed(Exception):
    """An update, or the forming of a group, failed.

    Attributes:
        blame: the error of each rollout that is known to have failed, by instance id; may be empty.
    """

    def __init__(self, what: str, blame: Mapping[str, str] | None = None):
        self.blame = dict(blame or {})
        super().__init__(what + "".join(f"; {name}: {why}" for name, why in self.blame.items()))


class WeightUpdate(Protocol):
    """One update, as a transport sees it."""

    version: int

    @property
    def manifest(self) -> rollout_pb2.WeightManifest:
        """Which tensor is where in which bucket."""

    def buckets(self) -> Iterator[torch.Tensor]:
        """Yield each bucket, uint8 on the transport's device. At most `packing.BUFFERS` are valid at a time: the next
        overwrites the oldest."""

    def begin(self, path: str = "") -> None:
        """Call BeginWeightUpdate at every member; `path` is the folder of the files. Raises TransferFailed."""

    def check(self) -> None:
        """Raise TransferFailed if the deadline has passed or a member is gone. Cheap: call it while waiting."""


class Channel(Protocol):
    """Rank 0's end of one epoch's group, in which all ranks have met."""

    def transfer(self, update: WeightUpdate) -> None:
        """Send all buckets to all members. Raises TransferFailed."""

    def drop(self, wait: float = 0.0) -> None:
        """Leave the group. Operations under way end on a thread, by their own deadlines; wait at most `wait` seconds
        for that thread."""


class Transport(Protocol):
    """A transport's end at the trainer; a package's `trainer_end` returns one."""

    libraries: dict[str, str]
    """Versions of libraries, by name, that must be the same at the rollouts."""
    device: torch.device
    """Where its buckets are."""

    def invite(self, epoch: int) -> dict[str, str]:
        """Prepare to meet the members of an epoch, and return what they need to connect, e.g. host and port. An earlier
        epoch that has not met yet is abandoned: end its `meet`."""
        return {}

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> Channel:
        """Meet the members of an epoch as rank 0. Blocks until all have connected, on a thread that the caller may
        abandon. The members have `secret`: verify it.

        Args:
            timeout: deadline of each operation in the group, in seconds.

        Raises:
            RuntimeError: not all members connected.
        """
        ...

    def close(self) -> None:
        """Stop listening: the publisher is closing."""
        return


class Files(Transport):
    """The file transport; also the `Channel` of every epoch, because its members need no connection."""

    device = torch.device("cpu")

    def __init__(self, folder: Path):
        """`folder` is used by this run only, and must be the same path at every rollout."""
        self._folder = folder.absolute()
        self.libraries = {}
        # A restarted trainer may train other weights with the same version number: its folders have other names.
        self._process = secrets.token_hex(4)
        self._written: tuple[int, Path] | None = None

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> Files:
        return self

    def transfer(self, update: WeightUpdate) -> None:
        if self._written is None or self._written[0] != update.version:
            try:
                self._written = self._write(update)
            except (OSError, SafetensorError) as error:
                reason = getattr(error, "strerror", None) or str(error)
                raise TransferFailed(f"trainer.weights.folder '{self._folder}' cannot be written: {reason}") from error
        update.begin(str(self._written[1]))

    def drop(self, wait: float = 0.0) -> None:
        """See `Channel.drop`: the files stay for the next epoch."""

    def _write(self, update: WeightUpdate) -> tuple[int, Path]:
        """Write a version's folder, atomically; return version and folder. Raises OSError, TransferFailed."""
        path = self._folder / f"{PREFIX}{update.version:08d}-{self._process}"
        writing = path.with_name(f".{path.name}.writing")
        for unfinished in self._folder.glob(f".{PREFIX}*.writing"):
            shutil.rmtree(unfinished, ignore_errors=True)  # of an attempt that failed, or a process that ended
        writing.mkdir(parents=True)
        manifest = update.manifest
        tensors = {index: list(group) for index, group in groupby(manifest.tensors, key=lambda tensor: tensor.bucket)}
        for index, bucket in enumerate(update.buckets()):
            update.check()
            contents = {tensor.name: view(tensor, bucket) for tensor in tensors.get(index, [])}
            save_file(contents, writing / bucket_file(manifest, index), metadata={"format": "pt"})
        _write_index(writing, manifest)
        writing.rename(path)
        self._remove_old(path)
        return update.version, path

    def _remove_old(self, newest: Path) -> None:
        others = [path for path in self._folder.glob(f"{PREFIX}*") if path != newest]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[KEPT - 1 :]:
            shutil.rmtree(path, ignore_errors=True)  # one that cannot be removed only costs disk space


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


def load_transport(name: str, parameters: dict[str, Any], host: str, folder: Path) -> Transport:
    """Create a package's end. Raises ConfigError if the package is not valid or its transport cannot work here."""
    plugin = load_transports()[name]
    checked = read_parameters(plugin.parameters, parameters, "trainer.weights.transport_parameters")
    try:
        end: Transport = plugin.trainer_end(checked, host, folder)
    except Exception as error:  # a package's code may raise anything
        raise ConfigError(f"trainer.weights.transport: {name} is not possible here: {error}") from error
    lacking = [part for part in _PARTS if not hasattr(end, part)]
    if lacking:
        gave = type(end).__name__
        raise ConfigError(f"transport '{name}': trainer_end returned a {gave}, which lacks {', '.join(lacking)}")
    return end
