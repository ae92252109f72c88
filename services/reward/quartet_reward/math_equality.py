"""Are two mathematical answers equal? The plain cases at once, in this process; the others by a killable worker."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from quartet.v1 import reward_pb2

from quartet_common.log import get_logger
from quartet_reward import telemetry
from quartet_reward.equality_policy import STRICT, EqualityPolicy
from quartet_reward.failures import VerifierFailure
from quartet_reward.plain_answers import decide
from quartet_reward.rationals import equal_rationals, parse_rational
from quartet_reward.reading import last_boxed
from quartet_reward.verdict_cache import VerdictCache
from quartet_reward.words import read_words, same_hour
from quartet_reward.worker_pool import PoolClosed, WorkerPool
from quartet_reward.worker_process import TaskTimedOut, WorkerDied

log = get_logger(__name__)

# Nobody writes a longer answer to be compared; symbolic parsing is worse than linear.
LONGEST_ANSWER = 2_000
# Under math-verify's own reading, a worker is given the whole completion.
LONGEST_COMPLETION = 50_000


_DECIDED = {way: telemetry.EQUALITY_DECISIONS.labels(way) for way in ("exact", "words")}


class Relation(StrEnum):
    """How an answer stands to the reference."""

    EQUAL = "equal"
    """They are the same value."""
    SAME_TEXT = "same_text"
    """The reference is no mathematics; the answer is the same text (ColossalChat's string fallback)."""
    DIFFERENT = "different"
    """They are not the same, or the answer cannot be read."""
    TIMED_OUT = "timed_out"
    """The answer took longer than the deadline to evaluate."""
    OUT_OF_MEMORY = "out_of_memory"
    """The answer took more memory than a worker has."""


class _Question(NamedTuple):
    answer: str
    reference: str
    policy: EqualityPolicy


@dataclass(frozen=True, slots=True)
class Equality:
    """The relation, why, and how long the question waited for a worker."""

    relation: Relation
    reason: str
    queued_seconds: float = 0.0


class MathEquality:
    """Decides equality of answers; shared by all verifiers that compare mathematics."""

    def __init__(self, pool: WorkerPool, cache_bytes: int = 64 << 20):
        """`cache_bytes`: how much of what workers decided is remembered."""
        self._pool = pool
        self._decided: VerdictCache[_Question, Equality] = VerdictCache("math", cache_bytes)

    def compare(
        self, answer: str, reference: str, policy: EqualityPolicy = STRICT
    ) -> Equality | Callable[[], Awaitable[Equality]]:
        """Return how `answer` stands to `reference`, or the work that finds out, to be called when there is room.

        Raises:
            VerifierFailure: the reference is empty. The work raises it too: the reference cannot be used, or a worker
                died twice.
        """
        if policy.guards:
            answer, reference = _last_box_or_all(answer), _unboxed(reference)
        if not reference.strip():
            raise VerifierFailure(
                reward_pb2.FAILURE_KIND_BAD_REFERENCE, "reference.answer is empty; it must hold an answer"
            )
        longest = LONGEST_ANSWER if policy.guards else LONGEST_COMPLETION
        if len(answer) > max(longest, 2 * len(reference)):
            return Equality(Relation.DIFFERENT, f"the answer has {len(answer)} characters; {longest} are compared")
        if policy.guards and (decided := _decide_here(answer, reference, policy)) is not None:
            return decided
        question = _Question(answer, reference, policy)
        if (known := self._decided.get(question)) is not None:
            telemetry.EQUALITY_DECISIONS.labels("cache").inc()
            return known
        return lambda: self._decided.ask(question, lambda: self._ask_worker(question))

    async def _ask_worker(self, question: _Question) -> Equality:
        telemetry.EQUALITY_DECISIONS.labels("worker").inc()
        request = {
            "reference": question.reference,
            "answer": question.answer,
            "policy": question.policy.as_request(),
        }
        try:
            try:
                reply = await self._pool.run(request)
            except WorkerDied as error:
                log.warning("a worker died (%s); the task is tried once more", error)
                reply = await self._pool.run(request)
        except WorkerDied as error:
            raise VerifierFailure(
                reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, f"the math worker died twice: {error}"
            ) from error
        except PoolClosed as error:
            raise VerifierFailure(reward_pb2.FAILURE_KIND_SHUT_DOWN, str(error)) from error
        except TaskTimedOut as error:
            if not error.reference_read:
                message = f"reading the reference '{question.reference[:80]}' was {error}"
                raise VerifierFailure(reward_pb2.FAILURE_KIND_BAD_REFERENCE, message) from error
            return Equality(Relation.TIMED_OUT, f"comparing the answer was {error}", error.queued_seconds)
        equality = _understand(reply.message, reply.queued_seconds)
        if equality.relation is not Relation.OUT_OF_MEMORY:  # which may be a truth about the worker's long life
            kept = Equality(equality.relation, equality.reason)
            characters = len(question.answer) + len(question.reference) + len(equality.reason)
            self._decided.put(question, kept, characters)
        return equality


def _decide_here(answer: str, reference: str, policy: EqualityPolicy) -> Equality | None:
    expected = parse_rational(reference)
    if expected is not None:
        found = parse_rational(answer)
        equal = None if found is None else equal_rationals(found, expected, policy.decimal_places)
        way = "exact"
    elif (equal := same_hour(answer, reference)) is not None:
        way = "words"
    else:
        expected_words = read_words(reference)
        found_words = None if expected_words is None else read_words(answer)
        equal = None if found_words is None else found_words == expected_words
        way = "words"
    if equal is None:
        equal, way = decide(answer, reference, policy), "exact"
    if equal is None:
        return None
    _DECIDED[way].inc()
    if equal:
        return Equality(Relation.EQUAL, f"{answer} is {reference}")
    return Equality(Relation.DIFFERENT, f"{answer[:80]} is not {reference[:80]}")


def _understand(message: dict, queued_seconds: float) -> Equality:
    match message["event"]:
        case "done" if message["equal"]:
            relation = Relation.SAME_TEXT if message["by_text"] else Relation.EQUAL
            return Equality(relation, message["reason"], queued_seconds)
        case "done":
            return Equality(Relation.DIFFERENT, message["reason"], queued_seconds)
        case "out_of_memory":
            return Equality(
                Relation.OUT_OF_MEMORY, "evaluating the answer took more memory than allowed", queued_seconds
            )
        case "bad_reference":
            raise VerifierFailure(reward_pb2.FAILURE_KIND_BAD_REFERENCE, f"reference.answer: {message['reason']}")
        case _:
            raise VerifierFailure(
                reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, f"the math worker failed: {message.get('reason', message)}"
            )


def _last_box_or_all(answer: str) -> str:
    box = last_boxed(answer) if "\\" in answer else None
    return (answer if box is None else box).strip()


def _unboxed(reference: str) -> str:
    """A reference of one box is what the box holds; one of several ("\\boxed{1} and \\boxed{2}") means them all."""
    reference = reference.strip()
    box = last_boxed(reference) if reference.startswith("\\boxed") else None
    return box if box is not None and reference == rf"\boxed{{{box}}}" else reference
