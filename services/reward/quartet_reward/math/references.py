"""How references read: as mathematics, as text, or not at all. For checks of data; nothing is compared."""

from dataclasses import dataclass
from enum import Enum

from quartet_reward.math.compare import EqualityPolicy
from quartet_reward.math.equality import is_plain, is_sentence, unboxed
from quartet_reward.math.extract import ReadingPolicy, reference_answer
from quartet_reward.workers.pool import TaskTimedOut, WorkerPool


class Kinds(Enum):
    """What a reference is."""

    MATHEMATICS = "mathematics"
    TEXT = "text"
    """Only the same text is equal to it."""
    UNUSABLE = "unusable"
    """Every item with it fails with BAD_REFERENCE."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How a reference reads, and why, if it is unusable."""

    kind: Kinds
    reason: str = ""


def read_here(reference: str, reading: ReadingPolicy, equality: EqualityPolicy) -> Reading | None:
    """Return how a reference reads, or None if a worker has to decide: see `read_as`."""
    answer = unboxed(reference_answer(reference, reading))
    if not answer.strip():
        return Reading(Kinds.UNUSABLE, "it is empty")
    if not is_plain(answer, equality):
        return None
    return Reading(Kinds.TEXT if is_sentence(answer, equality) else Kinds.MATHEMATICS)


async def read_as(pool: WorkerPool, reference: str, reading: ReadingPolicy, equality: EqualityPolicy) -> Reading | None:
    """Return how a reference reads; None: the worker could not tell. Raises WorkerDied."""
    if (found := read_here(reference, reading, equality)) is not None:
        return found
    answer = unboxed(reference_answer(reference, reading))
    try:
        message = await pool.run({"reference": answer, "policy": equality.model_dump()})
    except TaskTimedOut as error:
        return Reading(Kinds.UNUSABLE, f"reading it was {error}")
    match message["event"]:
        case "judged":
            return Reading(Kinds.TEXT if message["is_text"] else Kinds.MATHEMATICS)
        case "bad_reference":
            return Reading(Kinds.UNUSABLE, message["reason"])
    return None
