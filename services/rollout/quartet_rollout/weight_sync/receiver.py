"""A member of the weight group: receives updates into its own buffers, and merges an adapter into its base model.

It runs in the process that installs the weights: each worker process of an engine, or the engine's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError, safe_open

from quartet_common.model_folder import folder_checksum
from quartet_rollout.errors import EngineError, WeightTransferError, pack_error
from quartet_rollout.weight_sync import transports
from quartet_rollout.weight_sync.spec import LORA_PREFIX, WeightGroupInfo
from quartet_rollout.weight_sync.transports import Transport
from quartet_weights.buckets import BackgroundChecksum, views
from quartet_weights.process_group import start_thread


class WeightReceiver:
    """Holds at most one group and one received update.

    `join` and `receive` block, and a collective cannot be interrupted: `begin` calls them on a thread, and `poll`
    returns their result. An abandoned call (deadline, `leave`) may stay blocked there; nothing else then uses its group
    and buffers, and its late result is discarded.
    """

    def __init__(self, folder: str = "", member: int = 0) -> None:
        """
        Args:
            folder: the base model's, for adapters; "": adapters are rejected.
            member: this member's index among the engine's members.
        """
        self.member = member
        self._folder = folder
        self._base: Base | None = None
        self._call: Future[list[int] | None] = Future()
        self._lock = threading.Lock()
        self._group: Transport | None = None
        self._transport = ""
        self._membership = 0  # Counts joins and leaves: a call begun in an earlier membership must have no effect.
        self._spare: list[torch.Tensor] = []  # Reused, because page faults of new memory cost more than receiving.
        self._received: tuple[rollout_pb2.WeightManifest, list[torch.Tensor]] | None = None

    def begin(self, method: str, *args: Any) -> None:
        """Call `join` or `receive` on a new thread.

        Args:
            args: serializable. For `join`: the fields of the engine's `WeightGroupInfo`, and the names of the model's
                parameters. For `receive`: its own arguments, with the manifest serialized.
        """
        self._call = start_thread("weights", partial(self._run, method, *args))

    def _run(self, method: str, *args: Any) -> list[int] | None:
        if method == "receive":
            return self.receive(rollout_pb2.WeightManifest.FromString(args[0]), *args[1:])
        info, names = args
        self._base = Base(Path(self._folder), frozenset(names)) if self._folder else None
        group = WeightGroupInfo(**info)
        self.join(replace(group, rank=group.rank + self.member))
        return None

    def poll(self) -> list[Any] | None:
        """Return None while the last call of `begin` runs, then ["", result] or [error name, error text]."""
        if not self._call.done():
            return None
        error = self._call.exception()
        return ["", self._call.result()] if error is None else pack_error(error)

    def join(self, info: WeightGroupInfo) -> None:
        """Leave any group and join this one. Raises WeightTransferError; EngineError for another transport."""
        membership = self.leave()
        group = transports.join(info)
        with self._lock:
            if self._membership == membership:
                self._group, self._transport = group, info.transport
                return
        group.close()
        raise WeightTransferError(f"gave up joining the weight group of epoch {info.epoch}")

    def leave(self) -> int:
        """Leave the group, if any, and discard what was received. Returns the new membership count."""
        self.discard()
        with self._lock:
            group, self._group = self._group, None
            self._membership += 1
            membership = self._membership
        if group is not None:
            group.close()
        return membership

    def receive(self, manifest: rollout_pb2.WeightManifest, timeout_seconds: float, path: str = "") -> list[int]:
        """Receive the manifest's buckets; return the running checksum at the end of each.

        `path`: with the file transport, the folder of the files.

        Raises EngineError when in no group, and for an adapter of another base model; WeightTransferError when the
        sender is gone or the deadline has passed, after leaving the group: late buckets would otherwise be taken for
        those of the next update.
        """
        deadline = time.monotonic() + timeout_seconds
        self.discard()
        with self._lock:
            group, membership = self._group, self._membership
            if group is None:
                raise EngineError("weights were announced, but this rollout is in no weight group")
            buckets, self._spare = _fit(self._spare, manifest.bucket_bytes, group.device), []
        if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
            self._base_for().check(manifest.lora)
        checksum = BackgroundChecksum()
        try:
            with transports.failing(self._transport):
                for bucket in group.receive(manifest, buckets, path, deadline - time.monotonic()):
                    checksum.add(bucket)
            values = checksum.values()
        except WeightTransferError:
            with self._lock:
                if self._membership == membership:
                    self._group = None
            group.close()
            raise
        with self._lock:
            if self._membership != membership:
                raise WeightTransferError("the weight group was left during the transfer")
            self._received = (manifest, buckets)
        return values

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor) for all parameters: those received, or the base model with the received
        adapter. Valid until `discard`, `leave` or `receive`."""
        with self._lock:
            received = self._received
        if received is None:
            raise EngineError("no weights were received that could be installed")
        manifest, buckets = received
        if manifest.kind == rollout_pb2.WEIGHT_KIND_LORA:
            return self._base_for().merged(manifest.lora, dict(views(manifest, buckets)))
        return views(manifest, buckets)

    def has_received(self) -> bool:
        """Whether there are weights to install."""
        with self._lock:
            return self._received is not None

    def discard(self) -> None:
        """Discard what was received, and keep its buffers for the next update."""
        with self._lock:
            if self._received is not None:
                self._spare, self._received = self._received[1], None

    def _base_for(self) -> Base:
        if self._base is None:
            raise EngineError("an adapter was announced, and there is no base model that it could be added to")
        return self._base


def _fit(spare: Sequence[torch.Tensor], sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return uint8 buffers of these sizes, from `spare` where sizes and device agree."""
    return [
        spare[i]
        if i < len(spare) and spare[i].numel() == size and spare[i].device == device
        else torch.empty(size, dtype=torch.uint8, device=device)
        for i, size in enumerate(sizes)
    ]


class Base:
    """The weights of a model folder, to which a received LoRA adapter is added: W = W0 + B A alpha / r
    (arXiv:2106.09685).

    W0 is read from the folder for each update, not from the installed weights, so that no adapter is added twice.
    Tensor names are PEFT's.
    """

    def __init__(self, folder: Path, names: Container[str]) -> None:
        """`names`: the model's parameters; other tensors in the folder are ignored."""
        self._folder = folder
        self._names = names
        self._checksum: int | None = None

    def check(self, lora: rollout_pb2.LoraConfig) -> None:
        """Raise EngineError unless the trainer has the same base model. The first call reads the whole folder."""
        if not lora.base_checksum:
            return
        if self._checksum is None:
            try:
                self._checksum = folder_checksum(self._folder)
            except (OSError, ValueError) as error:
                raise EngineError(f"the base model of the adapter cannot be read: {error}") from error
        if self._checksum != lora.base_checksum:
            raise EngineError(
                f"the adapter is for a base model of checksum {lora.base_checksum:016x}, and '{self._folder}' has "
                f"{self._checksum:016x}: give trainer and rollout the same model.path"
            )

    def merged(
        self, lora: rollout_pb2.LoraConfig, adapter: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) for the whole model, with the adapter added. Sums are in float32, rounded once to the
        folder's dtype. Raises EngineError when the folder cannot be read, or lacks a matrix of the adapter."""
        scale = lora.alpha / lora.r
        unused = set(adapter)
        try:
            for path in sorted(self._folder.glob("*.safetensors")):
                with safe_open(path, framework="pt") as file:
                    for name in (name for name in file.keys() if name in self._names):  # noqa: SIM118 (no mapping)
                        weight = file.get_tensor(name)
                        part = LORA_PREFIX + name.removesuffix(".weight")
                        a, b = adapter.get(f"{part}.lora_A.weight"), adapter.get(f"{part}.lora_B.weight")
                        if a is not None and b is not None:
                            delta = (b.float() @ a.float()) * scale
                            unused -= {f"{part}.lora_A.weight", f"{part}.lora_B.weight"}
                            weight = (weight.float() + delta.to(weight.device)).to(weight.dtype)
                        yield name, weight
        except (OSError, SafetensorError) as error:
            raise EngineError(f"the base model of the adapter cannot be read: {error}") from error
        if unused:
            raise EngineError(f"the base model in '{self._folder}' has no matrix for '{min(unused)}'")
