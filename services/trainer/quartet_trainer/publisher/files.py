"""Files: safetensors in a folder that all rollouts see. `docs/weights.md` has the layout.

A version is written once, whole, before anybody is told of it, so generation does not wait for the disk, and a rollout
that comes late costs the trainer nothing.
"""

import json
import secrets
import shutil
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch
from quartet.v1 import rollout_pb2
from safetensors.torch import save_file

from quartet_common.log import get_logger
from quartet_common.weights import Checksum, bucket_file
from quartet_trainer.publisher.calls import TransferFailed
from quartet_trainer.publisher.packing import view
from quartet_trainer.publisher.transport import Carriage

log = get_logger(__name__)

# Versions that stay: the newest, and the one that a rollout may just be reading.
KEPT = 2
PREFIX = "version-"


class Files:
    """The `Transport`, and the `Channel` of every epoch: there is nobody to meet."""

    name = "file"
    code = rollout_pb2.WEIGHT_TRANSPORT_FILE
    device = torch.device("cpu")

    def __init__(self, folder: Path):
        """`folder` is this run's alone, and must be the same path at every rollout."""
        self._folder = folder.absolute()
        self.libraries: dict[str, str] = {}
        # A later life of the trainer may make another version of the same number: its folder has another name.
        self._life = secrets.token_hex(4)
        self._written: tuple[int, Path, int] | None = None

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> "Files":
        """See `Transport.meet`."""
        return self

    def carry(self, carriage: Carriage) -> int:
        """See `Channel.carry`."""
        if self._written is None or self._written[0] != carriage.version:
            try:
                self._written = self._write(carriage)
            except OSError as error:
                reason = error.strerror or str(error)
                raise TransferFailed(f"trainer.weights.folder '{self._folder}' cannot be written: {reason}") from error
        _, path, checksum = self._written
        carriage.begin(str(path))
        return checksum

    def drop(self, wait: float = 0.0) -> None:
        """See `Channel.drop`: the files stay for the next epoch."""

    def _write(self, carriage: Carriage) -> tuple[int, Path, int]:
        """Write a version's folder, atomically; return version, folder and checksum. Raises OSError, TransferFailed."""
        path = self._folder / f"{PREFIX}{carriage.version:08d}-{self._life}"
        writing = path.with_name(f".{path.name}.writing")
        for unfinished in self._folder.glob(f".{PREFIX}*.writing"):
            shutil.rmtree(unfinished, ignore_errors=True)  # of an attempt that failed, or an earlier life that ended
        writing.mkdir(parents=True)
        manifest, checksum = carriage.manifest, Checksum()
        tensors = {index: list(group) for index, group in groupby(manifest.tensors, key=lambda tensor: tensor.bucket)}
        for index, bucket in enumerate(carriage.buckets()):
            carriage.check()
            contents = {tensor.name: view(tensor, bucket) for tensor in tensors.get(index, [])}
            save_file(contents, writing / bucket_file(manifest, index), metadata={"format": "pt"})
            checksum.update(memoryview(bucket.numpy()))
        _write_index(writing, manifest)
        writing.rename(path)
        self._remove_old(path)
        return carriage.version, path, checksum.value()

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
            "target_modules": _plain(lora.target_modules),
        }
        (folder / "adapter_config.json").write_text(json.dumps(content, indent=2))
    elif len(manifest.bucket_bytes) > 1:
        index = {
            "metadata": {"total_size": sum(manifest.bucket_bytes)},
            "weight_map": {tensor.name: bucket_file(manifest, tensor.bucket) for tensor in manifest.tensors},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _plain(names: Sequence[str]) -> list[str]:
    return [str(name) for name in names]
