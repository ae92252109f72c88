"""What a transport is on the trainer's side, the one by files, and those of packages.

Files are safetensors in a folder that all rollouts see; `docs/weights.md` has the layout. A version is written once,
whole, before any rollout is told, so generation does not wait for the disk, and a rollout that comes late costs the
trainer nothing. `process_group` has Gloo and NCCL.
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
from safetensors.torch import save_file

from quartet_common.config import ConfigError
from quartet_common.transports import load_transports, read_parameters
from quartet_common.weights import bucket_file
from quartet_weights.buckets import view

# Versions that stay: the newest, and the one that a rollout may just be reading.
KEPT = 2
PREFIX = "version-"
_PARTS = ("device", "libraries", "invite", "meet", "close")


class TransferFailed(Exception):
    """An update or a group did not come about.

    Attributes:
        blame: what each rollout that is known to have failed said, by instance id; may be empty.
    """

    def __init__(self, what: str, blame: Mapping[str, str] | None = None):
        self.blame = dict(blame or {})
        super().__init__(what + "".join(f"; {name}: {why}" for name, why in self.blame.items()))


class WeightUpdate(Protocol):
    """One update on its way: the version, where its buckets come from, and whom to tell."""

    version: int

    @property
    def manifest(self) -> rollout_pb2.WeightManifest:
        """What is in the buckets."""

    def buckets(self) -> Iterator[torch.Tensor]:
        """Yield each bucket, uint8 on the transport's device; at most `packing.BUFFERS` of them stand at a time."""

    def begin(self, path: str = "") -> None:
        """Have every member pause and receive; `path` is where files are. Raises TransferFailed."""

    def check(self) -> None:
        """Raise TransferFailed when the time is over or a member is gone. Quick; to be called while waiting."""


class Channel(Protocol):
    """Rank 0's end of one group epoch, made when all ranks have met."""

    def transfer(self, update: WeightUpdate) -> None:
        """Get all buckets to all members. Raises TransferFailed."""

    def drop(self, wait: float = 0.0) -> None:
        """Leave. What is under way ends by its own deadline on a thread; wait so many seconds for that thread."""


class Transport(Protocol):
    """A way for weights to travel; what a package's `trainer_end` gives."""

    libraries: dict[str, str]
    """Versions that must be the same at the rollouts."""
    device: torch.device
    """Where its buckets are."""

    def invite(self, epoch: int) -> dict[str, str]:
        """Be ready to meet the members of an epoch, and return what each is told to find this end, e.g. host and port.
        An earlier epoch that has not met has been given up: its `meet` may wait no longer."""
        return {}

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> Channel:
        """Meet the members of an epoch as rank 0: blocks until all are here; run on a thread that may be lost. They
        have the same secret: have them show it.

        Args:
            timeout: deadline of each operation in the group, in seconds.

        Raises:
            RuntimeError: they did not meet.
        """
        ...

    def close(self) -> None:
        """Listen no more: the publisher ends."""
        return


class Files(Transport):
    """The `Transport`, and the `Channel` of every epoch: there is nobody to meet."""

    device = torch.device("cpu")

    def __init__(self, folder: Path):
        """`folder` is this run's alone, and must be the same path at every rollout."""
        self._folder = folder.absolute()
        self.libraries = {}
        # A restarted trainer may make another version of the same number: its folder has another name.
        self._process = secrets.token_hex(4)
        self._written: tuple[int, Path] | None = None

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> Files:
        return self

    def transfer(self, update: WeightUpdate) -> None:
        if self._written is None or self._written[0] != update.version:
            try:
                self._written = self._write(update)
            except OSError as error:
                reason = error.strerror or str(error)
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
            shutil.rmtree(path, ignore_errors=True)  # left behind, it costs space and nothing else


def _write_index(folder: Path, manifest: rollout_pb2.WeightManifest) -> None:
    """Write what makes the folder readable by Hugging Face's libraries: the shards' index, or PEFT's configuration."""
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
    """Make a package's end. Raises ConfigError, as `load_transports` does, and when it cannot work here."""
    plugin = load_transports()[name]
    checked = read_parameters(plugin, parameters)
    try:
        end: Transport = plugin.trainer_end(checked, host, folder)
    except Exception as error:  # a package's code: anything may come
        raise ConfigError(f"trainer.weights.transport: {name} is not possible here: {error}") from error
    lacking = [part for part in _PARTS if not hasattr(end, part)]
    if lacking:
        gave = type(end).__name__
        raise ConfigError(f"transport '{name}': trainer_end gave a {gave}, which lacks {', '.join(lacking)}")
    return end
