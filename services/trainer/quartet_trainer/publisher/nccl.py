"""NCCL: between GPUs, without vLLM. The group is met as vLLM's own weight-transfer engine meets a trainer that mints
the unique id itself: the id goes through the epoch's store, and one float is summed first."""

import time
from collections.abc import Callable

import torch
from quartet.v1 import rollout_pb2

from quartet_common import nccl
from quartet_trainer.publisher.calls import TransferFailed
from quartet_trainer.publisher.pipeline import send_all
from quartet_trainer.publisher.store import JOIN_SECONDS, WeightStore
from quartet_trainer.publisher.transport import Carriage, Wait

UNIQUE_ID_KEY = "nccl_unique_id"
_LOOK_SECONDS = 0.0005


class Stream:
    """A CUDA stream of our own."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)
        self.handle: int = self._stream.cuda_stream

    def after_current(self) -> None:
        """What follows waits for what the device's current stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def record(self) -> torch.cuda.Event:
        """Return what tells, by `query()`, whether all so far has been done."""
        return self._stream.record_event()


class Nccl:
    """The `Transport`: a communicator for each epoch, on the current CUDA device."""

    name = "nccl"
    code = rollout_pb2.WEIGHT_TRANSPORT_NCCL

    def __init__(
        self, store: WeightStore, device: torch.device | None = None, make_stream: Callable[..., Stream] = Stream
    ):
        self._store, self._make_stream = store, make_stream
        self.device = device or torch.device("cuda", torch.cuda.current_device())
        self.libraries = {"nccl": nccl.version()}

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> "NcclChannel":
        """See `Transport.meet`."""
        identity = nccl.unique_id()
        self._store.epoch(epoch, secret).set(UNIQUE_ID_KEY, identity)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # of this thread
        communicator = nccl.Communicator(identity, 0, world_size, min(timeout, JOIN_SECONDS))
        return NcclChannel(communicator, self.device, self._make_stream(self.device), timeout)


class NcclChannel:
    """Rank 0 of a group."""

    def __init__(self, communicator: nccl.Communicator, device: torch.device, stream: Stream, timeout: float):
        self._communicator, self._stream = communicator, stream
        one = torch.zeros(1, device=device)
        stream.after_current()
        communicator.sum_one(one.data_ptr(), stream.handle)
        deadline, summed = time.monotonic() + timeout, stream.record()
        while not summed.query():
            if time.monotonic() > deadline:
                communicator.abort()
                raise nccl.NcclError(f"NCCL: the first operation of the group did not end within {timeout:g} s")
            time.sleep(_LOOK_SECONDS)

    def carry(self, carriage: Carriage) -> int:
        """See `Channel.carry`."""
        return send_all(carriage, self.send)

    def send(self, bucket: torch.Tensor) -> Wait:
        """Begin to send a bucket, uint8 on the GPU, to all. Returns a function that waits for the end of it."""
        self._stream.after_current()
        try:
            self._communicator.broadcast(bucket.data_ptr(), bucket.numel(), self._stream.handle)
        except nccl.NcclError as error:
            raise TransferFailed(f"the broadcast failed: {error}") from error
        event = self._stream.record()

        def wait(check) -> None:
            while not event.query():
                check()
                time.sleep(_LOOK_SECONDS)

        return wait

    def drop(self, wait: float = 0.0) -> None:
        """See `Channel.drop`: NCCL aborts at once."""
        self._communicator.abort()
