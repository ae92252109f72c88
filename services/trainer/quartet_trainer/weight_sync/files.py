"""The file transport writes safetensors into a folder that all rollouts share; `docs/weights.md` has the layout.

A version is written once, before `BeginWeightUpdate` is called: generation does not wait for the disk, and a rollout
that joins later reads the same files.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

import torch
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError
from safetensors.torch import save_file

from quartet_common.weights import bucket_file
from quartet_trainer.weight_sync.rollouts import TransferFailed, WeightGroup
from quartet_weights.buckets import view

# Versions kept: the newest, and the one before it, which a rollout may still be reading.
KEPT = 2
PREFIX = "version-"


class Files:
    """The file transport, a `transports.Transport`: the publisher calls `write` before Begin, which announces the
    folder."""

    def __init__(self, folder: Path):
        """`folder` is used by this run only, and must be the same path at every rollout."""
        self.device = torch.device("cpu")
        self.libraries: dict[str, str] = {}
        self.invitation: dict[str, str] = {}
        self._folder = folder.absolute()
        # A restarted trainer may train other weights with the same version number: its folders have other names.
        self._process = secrets.token_hex(4)

    def write(
        self,
        group: WeightGroup,
        buckets: Iterable[torch.Tensor],
        version: int,
        manifest: rollout_pb2.WeightManifest,
    ) -> Path:
        """Return the folder of a version, which is written first, atomically, unless it is there. Raises
        TransferFailed."""
        path = self._folder / f"{PREFIX}{version:08d}-{self._process}"
        if path.exists():
            return path
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
