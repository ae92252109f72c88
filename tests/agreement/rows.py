"""A row of the agreement table, and the reward service."""

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
    """A row: the cases, the number of agreements, and the requirement."""

    name: str
    agreed: int
    total: int
    bar: str
    """The requirement as text."""
    passed: bool
    notes: list[str] = field(default_factory=list)
    """Disagreements, and other cases of interest."""


class Asker:
    """Requests verdicts from a reward service."""

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
        """Return the row of cases (name, item), all of which, or `least` of which, must agree."""
        results = self.ask([item for _, item in cases])
        pairs = zip(cases, results, strict=True)
        notes = [f"{case}: {said(result)}" for (case, _), result in pairs if not agrees(result)]
        agreed, bar = len(cases) - len(notes), "all" if least is None else f">= {least}"
        return Row(name, agreed, len(cases), bar, agreed >= (len(cases) if least is None else least), notes)


def item_of(
    verifier: str, completion: str, reference: reward_pb2.Reference, parameters: dict[str, Any]
) -> reward_pb2.ScoreItem:
    """Return the specification of one verifier."""
    struct = Struct()
    struct.update(parameters)
    specs = [reward_pb2.VerifierSpec(name=verifier, parameters=struct)]
    return reward_pb2.ScoreItem(completion=completion, reference=reference, verifiers=specs)


def correct(result: reward_pb2.ScoreResult) -> bool:
    return result.score.outcome == reward_pb2.OUTCOME_CORRECT


def said(result: reward_pb2.ScoreResult) -> str:
    """Return a result as text."""
    if result.WhichOneof("result") == "failure":
        return f"{reward_pb2.FailureKind.Name(result.failure.kind)}: {result.failure.message}"
    return f"{reward_pb2.Outcome.Name(result.score.outcome)}: {result.score.reason}"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON lines file, optionally gzipped; none if it does not exist."""
    if not path.exists():
        return []
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]


@contextlib.contextmanager
def reward_service(*settings: str) -> Iterator[Asker]:
    """Run a reward service of this checkout during the block. `settings`: KEY=VALUE of its run file."""
    with (
        tempfile.TemporaryDirectory() as folder,
        service("reward", Path(folder), list(settings)) as address,
        grpc.insecure_channel(address) as channel,
    ):
        yield Asker(channel)
