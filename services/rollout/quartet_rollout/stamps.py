"""When the parts of a group were done, by the rollout's clock: for whoever asks where its time went."""

import asyncio
import time
from functools import partial
from typing import Any

from quartet.v1 import experience_pb2

from quartet_common.durations import now_timestamp, to_duration


class Stamps:
    """One group's, from the moment it is made: the beginning of the generation."""

    def __init__(self) -> None:
        self.started_at = now_timestamp()
        self._began = time.monotonic()
        self._generated: dict[int, float] = {}
        self._scored: dict[int, float] = {}

    def generated(self, index: int) -> None:
        """The last token of a completion is there."""
        self._generated[index] = time.monotonic() - self._began

    def score_awaited(self, index: int, score: "asyncio.Future[Any]") -> None:
        """Note when the score of a completion comes."""
        score.add_done_callback(partial(self._note_score, index))

    def _note_score(self, index: int, _: object) -> None:
        self._scored[index] = time.monotonic() - self._began

    def write(self, info: experience_pb2.CompletionInfo) -> None:
        """Put the times of a completion, which has all it will have, into what is said about it."""
        if (generated := self._generated.get(info.index)) is not None:
            info.generated_after.CopyFrom(to_duration(generated))
        if info.HasField("score"):
            # Not noted yet: it came in this very turn of the event loop.
            scored = self._scored.get(info.index, time.monotonic() - self._began)
            info.scored_after.CopyFrom(to_duration(scored))
