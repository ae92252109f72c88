"""NCCL: between GPUs, without vLLM. The group is met as vLLM's own weight-transfer engine meets a trainer that mints
the unique id itself: the id goes through the epoch's store, and one float is summed first."""

import time

import torch
from quartet.v1 import rollout_pb2

from quartet_common import nccl
from quartet_trainer.publisher.calls import TransferFailed
from quartet_trainer.publisher.pipeline import send_all
from quartet_trainer.publisher.store import WeightStore
from quartet_trainer.publisher.transport import Carriage, Wait

UNIQUE_ID_KEY = "nccl_unique_id"
_LOOK_SECONDS = 0.0005


class Nccl:
    """The `Transport`: a communicator for each epoch, on the current CUDA device."""

    name = "nccl"
    code = rollout_pb2.WEIGHT_TRANSPORT_NCCL

    def __init__(self, store: WeightStore):
        self._store = store
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.libraries = {"nccl": nccl.version()}

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> "NcclChannel":
        """See `Transport.meet`."""
        identity = nccl.unique_id()
        self._store.epoch(epoch, secret).set(UNIQUE_ID_KEY, identity)
        with torch.cuda.device(self.device):
            return NcclChannel(nccl.Communicator(identity, 0, world_size), self.device)


class NcclChannel:
    """Rank 0 of a group."""

    def __init__(self, communicator: nccl.Communicator, device: torch.device):
        self._communicator = communicator
        self._stream = torch.cuda.Stream(device)
        one = torch.zeros(1, device=device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        communicator.sum_one(one.data_ptr(), self._stream.cuda_stream)
        self._stream.synchronize()

    def carry(self, carriage: Carriage) -> int:
        """See `Channel.carry`."""
        return send_all(carriage, self.send)

    def send(self, bucket: torch.Tensor) -> Wait:
        """Begin to send a bucket, uint8 on the GPU, to all. Returns a function that waits for the end of it."""
        self._stream.wait_stream(torch.cuda.current_stream(bucket.device))
        try:
            self._communicator.broadcast(bucket.data_ptr(), bucket.numel(), self._stream.cuda_stream)
        except nccl.NcclError as error:
            raise TransferFailed(f"the broadcast failed: {error}") from error
        event = self._stream.record_event()

        def wait(check) -> None:
            while not event.query():
                check()
                time.sleep(_LOOK_SECONDS)

        return wait

    def drop(self, wait: float = 0.0) -> None:
        """See `Channel.drop`: NCCL aborts at once."""
        self._communicator.abort()
