"""A rollout that only receives weights, by Gloo or from files, in a process of its own, for the publisher's tests."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
import torch.distributed as dist
import xxhash
from processes import FORKS, Forked
from quartet.v1 import broker_pb2, common_pb2, common_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from safetensors.torch import load_file

from quartet_common.weights import check_manifest


@dataclass
class Options:
    """How it differs from a rollout that does its part."""

    at: tuple[int, int, signal.Signals] | None = None
    """Of that version and before that bucket it sends itself this signal."""
    spoil: int | None = None
    """Of that version it flips a byte, once."""


class Receiver(rollout_pb2_grpc.RolloutServiceServicer, common_pb2_grpc.HandshakeServiceServicer):
    def __init__(self, name: str, folder: Path, options: Options):
        self.name, self.folder, self.options = name, folder, options
        self.version = self.epoch = -1
        self.group: dist.ProcessGroupGloo | None = None
        self.formed = threading.Event()
        self.received: tuple[rollout_pb2.BeginWeightUpdateRequest, list[torch.Tensor]] | None = None
        self.failure = ""
        self.done = threading.Event()

    def Handshake(self, request, context):
        capabilities = ["weights.full", "weights.lora", "weights.file", "weights.gloo"]
        lacking = set(request.required_capabilities) - set(capabilities)
        if lacking:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"this rollout lacks {', '.join(lacking)}")
        return common_pb2.HandshakeResponse(capabilities=capabilities)

    def GetStatus(self, request, context):
        return rollout_pb2.RolloutServiceGetStatusResponse(
            policy_version=self.version, group_epoch=self.epoch, instance_id=self.name
        )

    def JoinWeightGroup(self, request, context):
        if request.group_epoch < self.epoch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"epoch {request.group_epoch} < {self.epoch}")
        self.epoch, self.group, formed = request.group_epoch, None, threading.Event()
        self.formed = formed
        if request.transport == rollout_pb2.WEIGHT_TRANSPORT_FILE:
            formed.set()
            return rollout_pb2.JoinWeightGroupResponse(ranks=1)

        def join():
            timeout = timedelta(seconds=request.timeout.seconds)
            store = dist.TCPStore(request.store_host, request.store_port, is_master=False, timeout=timeout)
            store = dist.PrefixStore(f"quartet/{request.group_epoch}/{request.secret.hex()}", store)
            self.group = dist.ProcessGroupGloo(store, request.rank, request.world_size, timeout)
            formed.set()

        threading.Thread(target=join, daemon=True).start()
        return rollout_pb2.JoinWeightGroupResponse(ranks=1)

    def BeginWeightUpdate(self, request, context):
        if request.group_epoch != self.epoch or not self.formed.wait(20):
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not in the group of that epoch")
        check_manifest(request.manifest)
        self.failure, done = "", threading.Event()
        self.done = done
        buckets = [torch.empty(size, dtype=torch.uint8) for size in request.manifest.bucket_bytes]
        self.received = (request, buckets)
        group = self.group

        def receive():
            try:
                for index, bucket in enumerate(buckets):
                    if self.options.at and self.options.at[:2] == (request.policy_version, index):
                        os.kill(os.getpid(), self.options.at[2])
                    if request.path:
                        read(request, index, bucket)
                    else:
                        group.broadcast([bucket], dist.BroadcastOptions()).wait()
            except (RuntimeError, OSError) as error:
                self.failure = str(error)
            done.set()

        threading.Thread(target=receive, daemon=True).start()
        return rollout_pb2.BeginWeightUpdateResponse()

    def FinishWeightUpdate(self, request, context):
        if not self.done.wait(30) or self.failure:
            self.version = -1
            context.abort(grpc.StatusCode.ABORTED, self.failure or "too late")
        begin, buckets = self.received
        if self.options.spoil == begin.policy_version:
            self.options.spoil = None
            buckets[0][0] ^= 1
        hashed, checksums = xxhash.xxh3_64(), []
        for bucket in buckets:
            hashed.update(bucket.numpy())
            checksums.append(hashed.intdigest())
        if checksums != [*request.bucket_checksums] or checksums[-1] != request.checksum:
            self.version = self.epoch = -1
            context.abort(grpc.StatusCode.DATA_LOSS, "checksum differs")
        path = self.folder / f"{self.name}-v{request.policy_version}.bin"
        path.write_bytes(b"".join(bytes(bucket.numpy()) for bucket in buckets))
        self.version = request.policy_version
        self._log(f"version {self.version}")
        return rollout_pb2.FinishWeightUpdateResponse(policy_version=self.version)

    def SetSleep(self, request, context):
        self._log(f"sleep {request.level} for {request.timeout.seconds} s")
        return rollout_pb2.SetSleepResponse(policy_version=self.version)

    def _log(self, line: str) -> None:
        with (self.folder / f"{self.name}.log").open("a") as file:
            file.write(line + "\n")

    def AbortWeightUpdate(self, request, context):
        self.epoch, self.group = -1, None
        return rollout_pb2.AbortWeightUpdateResponse(policy_version=self.version)


def read(request: rollout_pb2.BeginWeightUpdateRequest, index: int, bucket: torch.Tensor) -> None:
    """Fill a bucket from whichever of the folder's files has its tensors."""
    contents: dict[str, torch.Tensor] = {}
    for path in Path(request.path).glob("*.safetensors"):
        contents |= load_file(path)
    bucket.zero_()
    for tensor in request.manifest.tensors:
        if tensor.bucket == index:
            data = contents[tensor.name].reshape(-1).view(torch.uint8)
            bucket[tensor.offset : tensor.offset + len(data)] = data


def serve(connection: Connection, name: str, folder: Path, options: Options) -> None:
    """Send the port; serve until the test ends the process. What is installed is in FOLDER/NAME-vVERSION.bin."""
    receiver, server = Receiver(name, folder, options), grpc.server(ThreadPoolExecutor(8))
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(receiver, server)
    common_pb2_grpc.add_HandshakeServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection.send(port)
    server.wait_for_termination()


class ReceiverProcess(Forked):
    """A receiver that runs, as a member of a run."""

    def __init__(self, name: str, folder: Path, **options: Any):
        ours, theirs = FORKS.Pipe()
        super().__init__(folder / f"{name}.stderr", serve, theirs, name, folder, Options(**options))
        self.name, self.folder = name, folder
        assert ours.poll(60), f"receiver {name} did not start: {self.said()}"
        self.member = broker_pb2.Member(
            instance_id=name,
            kind=common_pb2.SERVICE_KIND_ROLLOUT,
            address=f"127.0.0.1:{ours.recv()}",
            capabilities=["weights.gloo"],
            state=broker_pb2.MEMBER_STATE_JOINING,
            policy_version=-1,
        )

    def installed(self, version: int) -> bytes | None:
        """The buckets it installed as `version`."""
        path = self.folder / f"{self.name}-v{version}.bin"
        return path.read_bytes() if path.exists() else None

    def log(self) -> list[str]:
        """Versions it installed, and its sleeps."""
        return (self.folder / f"{self.name}.log").read_text().splitlines()


Receivers = Callable[..., ReceiverProcess]


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receivers]:
    """Start receivers, `receiver(name, **Options)`; they are ended after the test."""
    started: list[ReceiverProcess] = []

    def start(name: str, **options: Any) -> ReceiverProcess:
        started.append(ReceiverProcess(name, tmp_path, **options))
        return started[-1]

    yield start
    for process in started:
        process.end()
