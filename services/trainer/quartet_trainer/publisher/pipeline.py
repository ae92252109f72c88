"""Buckets through a broadcast: one is packed while others are on their way and are checksummed."""

from collections import deque
from collections.abc import Callable

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
    checksum = BackgroundChecksum()
    under_way: deque[Callable[[], None]] = deque()
    try:
        for bucket in carriage.buckets():
            sent, read = send(bucket), checksum.add(lambda bucket=bucket: memoryview(bucket.cpu().numpy()))

            def wait(sent: Wait = sent, read=read) -> None:
                sent(carriage.check)
                read.wait()

            under_way.append(wait)
            if len(under_way) == BUFFERS:  # the next bucket would overwrite the oldest
                under_way.popleft()()
        while under_way:
            under_way.popleft()()
        return checksum.value()
    finally:
        checksum.close()
