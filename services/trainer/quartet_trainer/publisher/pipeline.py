"""Buckets through a broadcast: one is packed while others are on their way and are checksummed."""

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from quartet_common.weights import BackgroundChecksum
from quartet_trainer.publisher.packing import BUFFERS
from quartet_trainer.publisher.transport import Carriage, Wait


def send_all(carriage: Carriage, send: Callable[[torch.Tensor], Wait]) -> int:
    """Begin the update, send every bucket and return their checksum.

    Args:
        send: begins to send one bucket, and returns what waits for the end of it.

    Raises:
        TransferFailed: see Carriage.begin, Carriage.check and `send`.
    """
    carriage.begin()
    if carriage.checksum is not None:  # what is sent stands as it is
        _send(carriage, lambda bucket: partial(send(bucket), carriage.check))
        return carriage.checksum()
    checksum = BackgroundChecksum()

    def send_and_read(bucket: torch.Tensor) -> Callable[[], None]:
        sent, read = send(bucket), checksum.add(lambda: memoryview(bucket.cpu().numpy()))

        def wait() -> None:
            sent(carriage.check)
            read.wait()

        return wait

    try:
        _send(carriage, send_and_read)
        return checksum.value()
    finally:
        checksum.close()


def _send(carriage: Carriage, send: Callable[[torch.Tensor], Callable[[], None]]) -> None:
    """Send every bucket; what `send` returns waits until one may be overwritten."""
    under_way: deque[Callable[[], None]] = deque()
    for bucket in carriage.buckets():
        under_way.append(send(bucket))
        if len(under_way) == BUFFERS:  # the next bucket may overwrite the oldest
            under_way.popleft()()
    while under_way:
        under_way.popleft()()
