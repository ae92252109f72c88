"""Gloo: between CPUs, by TCP."""

import contextlib
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from quartet.v1 import rollout_pb2

from quartet_trainer.publisher.calls import LOOK_SECONDS, TransferFailed
from quartet_trainer.publisher.pipeline import send_all
from quartet_trainer.publisher.store import WeightStore
from quartet_trainer.publisher.transport import Carriage, Wait


class Gloo:
    """The `Transport`: a private process group for each epoch, no part of the default one."""

    name = "gloo"
    code = rollout_pb2.WEIGHT_TRANSPORT_GLOO
    device = torch.device("cpu")

    def __init__(self, store: WeightStore):
        self._store = store
        self.libraries: dict[str, str] = {}

    def meet(self, epoch: int, secret: bytes, world_size: int, timeout: float) -> "GlooChannel":
        """See `Transport.meet`."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._store.host)]
        return GlooChannel(dist.ProcessGroupGloo(self._store.epoch(epoch, secret), 0, world_size, options))


class GlooChannel:
    """Rank 0 of a group."""

    def __init__(self, group: dist.ProcessGroupGloo):
        self._group: dist.ProcessGroupGloo | None = group

    def carry(self, carriage: Carriage) -> int:
        """See `Channel.carry`."""
        return send_all(carriage, self.send)

    def send(self, bucket: torch.Tensor) -> Wait:
        """Begin to send a bucket, uint8, to all. Returns a function that waits for the end of it, and raises
        TransferFailed."""
        assert self._group is not None, "the group was dropped"
        done = threading.Event()
        work = self._group.broadcast([bucket], dist.BroadcastOptions())
        work.get_future().add_done_callback(lambda _: done.set())

        def wait(check) -> None:
            while not done.wait(LOOK_SECONDS):
                check()
            try:
                work.wait()
            except RuntimeError as error:
                raise TransferFailed(f"the broadcast failed: {str(error).splitlines()[0]}") from error

        return wait

    def drop(self, wait: float = 0.0) -> None:
        """See `Channel.drop`."""
        holder = [self._group]
        self._group = None
        if holder[0] is not None:
            thread = threading.Thread(target=_destroy, args=(holder,), name="drop-weight-group", daemon=True)
            thread.start()
            thread.join(wait)


def _destroy(holder: list[dist.ProcessGroupGloo]) -> None:
    """Release the last reference, which is in `holder` alone: whoever does that waits for operations under way."""
    with contextlib.suppress(RuntimeError):  # there is no use in an error of what is thrown away
        holder[0].abort()
    holder.clear()
