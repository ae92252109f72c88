"""One line of the agreement table, and the service that is asked."""

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from quartet.v1 import reward_pb2, reward_pb2_grpc

from benchmarks.measuring import service

_BATCH = 128
_BATCH_SECONDS = 300


@dataclass(frozen=True)
class Row:
    """What was asked, how often the service agreed, and whether that is enough."""

    name: str
    agreed: int
    total: int
    bar: str
    """What is enough, in words."""
    passed: bool
    notes: list[str] = field(default_factory=list)
    """Each case that did not agree, or that a reader wants to see."""


class Asker:
    """Asks a reward service for verdicts."""

    def __init__(self, channel: grpc.Channel):
        self._stub = reward_pb2_grpc.RewardServiceStub(channel)

    def ask(self, items: Sequence[reward_pb2.ScoreItem]) -> list[reward_pb2.ScoreResult]:
        """Return the items' results, in their order. Raises grpc.RpcError."""
        results: list[reward_pb2.ScoreResult] = []
        for start in range(0, len(items), _BATCH):
            batch = [named(item, str(start + i)) for i, item in enumerate(items[start : start + _BATCH])]
            results += self._stub.Score(reward_pb2.ScoreRequest(items=batch), timeout=_BATCH_SECONDS).results
        return results


def named(item: reward_pb2.ScoreItem, item_id: str) -> reward_pb2.ScoreItem:
    """Return the item under another name."""
    copy = reward_pb2.ScoreItem()
    copy.CopyFrom(item)
    copy.item_id = item_id
    return copy


@contextlib.contextmanager
def reward_service(*settings: str) -> Iterator[Asker]:
    """Run a reward service of this checkout for the time of the block. `settings`: KEY=VALUE of its run file."""
    with (
        tempfile.TemporaryDirectory() as folder,
        service("reward", Path(folder), list(settings)) as address,
        grpc.insecure_channel(address) as channel,
    ):
        yield Asker(channel)
