"""One RPC to many rollouts at once."""

import queue
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import grpc

from quartet_common.errors import describe

# How often the living are counted while answers are awaited.
LOOK_SECONDS = 0.2

Answer = TypeVar("Answer")


class TransferFailed(Exception):
    """An update or a group did not come about.

    Attributes:
        blame: what each rollout that is known to have failed said, by instance id; may be empty.
    """

    def __init__(self, what: str, blame: Mapping[str, str] | None = None):
        self.blame = dict(blame or {})
        super().__init__(what + "".join(f"; {name}: {why}" for name, why in self.blame.items()))


@dataclass
class Answers(Generic[Answer]):
    """What each rollout answered, by instance id."""

    good: dict[str, Answer] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)

    def raise_if_bad(self, what: str) -> None:
        """Raise TransferFailed with the blame if any rollout failed."""
        if self.bad:
            raise TransferFailed(f"{what} failed", self.bad)


def gather(calls: Mapping[str, grpc.Future], deadline: float, alive: Callable[[str], bool]) -> Answers:
    """Wait for all answers: until `deadline` (time.monotonic), and for nobody who is no longer `alive`."""
    answers: Answers = Answers()
    finished: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name, call in calls.items():
        call.add_done_callback(lambda _, name=name: finished.put(name))
    waiting = set(calls)
    while waiting:
        try:
            name = finished.get(timeout=LOOK_SECONDS)
        except queue.Empty:
            late = time.monotonic() > deadline
            for name in [name for name in waiting if late or not alive(name)]:
                calls[name].cancel()
                waiting.discard(name)
                answers.bad[name] = "did not answer in time" if late else "is gone"
            continue
        if name not in waiting:
            continue
        waiting.discard(name)
        error = calls[name].exception()
        if error is None:
            answers.good[name] = calls[name].result()
        else:
            answers.bad[name] = describe(error)
    return answers
