"""The interface of a transport on the trainer's side, and the transports: Gloo, NCCL, files, those of packages.

A group's rollouts are invited by `form_group`. It is never repaired: when a member fails, one with a higher epoch is
formed.

The file transport writes safetensors into a folder that all rollouts share; `docs/weights.md` has the layout. A version
is written once, before `BeginWeightUpdate` is called: generation does not wait for the disk, and a rollout that joins
later reads the same files.
"""

from __future__ import annotations

import json
import secrets
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from quartet.v1 import rollout_pb2
from safetensors import SafetensorError
from safetensors.torch import save_file

from quartet_common.config import ConfigError
from quartet_common.durations import to_duration
from quartet_common.log import get_logger
from quartet_common.ports import AddressUnavailable
from quartet_common.weights import bucket_file
from quartet_server.plugins import read_parameters
from quartet_server.transports import OWN_TRANSPORTS, load_transports
from quartet_trainer.config import WeightsSection
from quartet_trainer.weight_sync.packing import BUFFERS
from quartet_trainer.weight_sync.rollouts import POLL_SECONDS, TransferFailed, WeightGroup, gather
from quartet_weights.buckets import view
from quartet_weights.process_group import (
    GroupError,
    ProcessGroup,
    device_of,
    epoch_store,
    first_line,
    nccl_version,
    start_thread,
)

log = get_logger(__name__)

# Forming a group takes about a second.
JOIN_SECONDS = 20.0
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
    """Gloo and NCCL: one broadcast for each bucket; the next is packed while earlier ones are sent and checksummed.

    The ranks of all epochs meet at one TCPStore. Each epoch's keys begin with its secret, which only members have.
    """

    def __init__(self, backend: str, host: str, port: int = 0, interface: str = ""):
        """Open the store at host:port.

        Args:
            backend: "gloo" or "nccl".
            port: 0: any free one.
            interface: see `ProcessGroup`.

        Raises:
            AddressUnavailable: this host cannot listen there.
        """
        self._backend, self.host, self._interface = backend, host, interface
        self.device = device_of(backend)
        self.libraries = {"nccl": nccl_version()} if backend == "nccl" else {}
        self.invitation = {}
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (")[0].lower()
            raise AddressUnavailable(f"trainer.weights.store_host: cannot listen on {host}:{port}: {why}") from error
        self.port: int = listener.getsockname()[1]
        # By default TCPStore listens on all interfaces; with `master_listen_fd` only on that socket, which it owns.
        self._store: dist.TCPStore | None = dist.TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    @contextmanager
    def meeting(self, group: WeightGroup, deadline: float) -> Iterator[None]:
        """Join `group` as rank 0 while its rollouts are invited inside the context. Raises TransferFailed, at
        `deadline` (time.monotonic) at the latest."""
        joining = start_thread(f"weight-group-{group.epoch}", partial(self._join, group))
        yield
        failed = f"weight group {group.epoch} failed to form"
        while not wait([joining], POLL_SECONDS).done:
            gone = [rollout for rollout in group.rollouts if not group.alive(rollout)]
            if gone or time.monotonic() > deadline:
                raise TransferFailed(failed, dict.fromkeys(gone, "is gone"))
        if (error := joining.exception()) is not None:
            raise TransferFailed(f"{failed}: {first_line(error, group.secret)}")
        group.process_group = joining.result()

    def _join(self, group: WeightGroup) -> ProcessGroup:
        store = epoch_store(self.host, self.port, group.epoch, group.secret, JOIN_SECONDS)
        return ProcessGroup(self._backend, store, 0, group.world_size, group.seconds, self.host, self._interface)

    def send(self, group: WeightGroup, buckets: Iterable[torch.Tensor]) -> None:
        assert group.process_group is not None
        try:
            for _ in group.process_group.broadcast(buckets, ahead=BUFFERS, check=group.check):
                pass  # the next bucket overwrites the oldest
        except GroupError as error:
            raise TransferFailed(f"the broadcast failed: {error}") from error

    def close(self) -> None:
        """Stop listening. The publisher closes the group."""
        self._store = None  # TCPStore closes its sockets when the last reference is gone


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
        AddressUnavailable: this host cannot listen at `host`.
        ConfigError: a package is not valid, or its transport cannot work here.
    """
    name = settings.transport
    if name == "file":
        return Files(folder)
    if name in OWN_TRANSPORTS:
        return Broadcast(name, host, settings.store_port, settings.interface)
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


def form_group(name: str, transport: Transport, group: WeightGroup) -> None:
    """Invite the rollouts of `group`; with gloo or nccl, rank 0 joins its process group meanwhile.

    Args:
        name: of the transport.

    Raises:
        TransferFailed: a rollout did not join, or has another number of ranks than assumed, which is corrected.
    """
    own = name in OWN_TRANSPORTS
    request = rollout_pb2.JoinWeightGroupRequest(
        run_id=group.run_id,
        group_epoch=group.epoch,
        transport=f"WEIGHT_TRANSPORT_{name.upper() if own else 'CUSTOM'}",
        world_size=group.world_size,
        timeout=to_duration(group.seconds),
        libraries=transport.libraries,
        secret=group.secret,
        transport_name="" if own else name,
        invitation=transport.invitation,
    )
    deadline = time.monotonic() + JOIN_SECONDS
    joined: AbstractContextManager[None] = nullcontext()
    if isinstance(transport, Broadcast):
        request.store_host, request.store_port = transport.host, transport.port
        joined = transport.meeting(group, deadline)
    with joined:
        calls, request.rank = {}, 1
        for rollout, known in group.rollouts.items():  # each call serializes the request as it is then
            calls[rollout] = known.stub.JoinWeightGroup.future(request, timeout=JOIN_SECONDS)
            request.rank += known.ranks
        if errors := gather(calls, deadline, group.alive):
            raise TransferFailed(f"joining weight group {group.epoch} failed", errors)
        ranks = {rollout: max(1, call.result().ranks) for rollout, call in calls.items()}
        wrong = {rollout: count for rollout, count in ranks.items() if count != group.rollouts[rollout].ranks}
        for rollout, count in wrong.items():
            group.rollouts[rollout].ranks = count
        if wrong:
            came = f"rollouts have another number of ranks than assumed: {wrong}"
            raise TransferFailed(f"weight group {group.epoch}: {came}")
    log.info("weight group made", extra={"epoch": group.epoch, "ranks": group.world_size, "transport": name})
