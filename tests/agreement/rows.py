"""One line of the agreement table, and the service that is asked."""

import contextlib
import gzip
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.struct_pb2 import Struct
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
            request = reward_pb2.ScoreRequest(items=items[start : start + _BATCH])
            for index, item in enumerate(request.items):
                item.item_id = str(index)
            results += self._stub.Score(request, timeout=_BATCH_SECONDS).results
        return results

    def compare(
        self,
        name: str,
        cases: Sequence[tuple[str, reward_pb2.ScoreItem]],
        agrees: Callable[[reward_pb2.ScoreResult], bool],
        least: int | None = None,
    ) -> Row:
        """Return the row of cases (what it is called, what is asked) that each have to agree; `least`: or so many."""
        results = self.ask([item for _, item in cases])
        pairs = zip(cases, results, strict=True)
        notes = [f"{case}: {said(result)}" for (case, _), result in pairs if not agrees(result)]
        agreed, bar = len(cases) - len(notes), "all" if least is None else f">= {least}"
        return Row(name, agreed, len(cases), bar, agreed >= (len(cases) if least is None else least), notes)


def item_of(
    verifier: str, completion: str, reference: reward_pb2.Reference, parameters: dict[str, Any]
) -> reward_pb2.ScoreItem:
    """Return what asks one verifier."""
    struct = Struct()
    struct.update(parameters)
    specs = [reward_pb2.VerifierSpec(name=verifier, parameters=struct)]
    return reward_pb2.ScoreItem(completion=completion, reference=reference, verifiers=specs)


def correct(result: reward_pb2.ScoreResult) -> bool:
    return result.score.outcome == reward_pb2.OUTCOME_CORRECT


def said(result: reward_pb2.ScoreResult) -> str:
    """Return a result in words."""
    if result.WhichOneof("result") == "failure":
        return f"{reward_pb2.FailureKind.Name(result.failure.kind)}: {result.failure.message}"
    return f"{reward_pb2.Outcome.Name(result.score.outcome)}: {result.score.reason}"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines, packed or not; none if there is no such file."""
    if not path.exists():
        return []
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


@contextlib.contextmanager
def reward_service(*settings: str) -> Iterator[Asker]:
    """Run a reward service of this checkout for the time of the block. `settings`: KEY=VALUE of its run file."""
    with (
        tempfile.TemporaryDirectory() as folder,
        service("reward", Path(folder), list(settings)) as address,
        grpc.insecure_channel(address) as channel,
    ):
        yield Asker(channel)
