"""Are two mathematical answers equal? The plain cases at once, in this process; the others by a killable worker."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from quartet.v1 import reward_pb2

from quartet_common.log import get_logger
from quartet_reward import metrics
from quartet_reward.answer_extraction import last_boxed
from quartet_reward.errors import VerifierFailure
from quartet_reward.math.compare import STRICT, Comparison, EqualityPolicy
from quartet_reward.math.fast import equal_rationals, parse_rational
from quartet_reward.math.forms import read
from quartet_reward.queue import CURRENT_RUN
from quartet_reward.workers.pool import PoolClosed, Reply, TaskTimedOut, WorkerDied, WorkerPool

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

# Of an entry beside its text: dictionary, key, value.
_OVERHEAD_BYTES = 600

log = get_logger(__name__)
# Nobody writes a longer answer to be compared; symbolic parsing is worse than linear.
LONGEST_ANSWER = 2_000
# Under math-verify's own reading, a worker is given the whole completion.
LONGEST_COMPLETION = 50_000
# Longer texts are read by a worker, which can be killed.
_LONGEST_PLAIN = 400
_EXACT = metrics.EQUALITY_DECISIONS.labels("exact")


class VerdictCache(Generic[K, V]):
    """Verdicts by question, the least lately used dropped first."""

    def __init__(self, name: str, most_bytes: int):
        """`name` is the label `cache` of the metrics; 0 bytes keep nothing."""
        self._most = most_bytes
        self._kept: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._under_way: dict[Hashable, asyncio.Task[V]] = {}
        self._asking: dict[Hashable, int] = {}
        self._gauge = metrics.CACHE_BYTES.labels(name)
        self._hits = metrics.CACHE_LOOKUPS.labels(name, "hit")
        self._shared = metrics.CACHE_LOOKUPS.labels(name, "shared")
        self._misses = metrics.CACHE_LOOKUPS.labels(name, "miss")
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, question: K) -> V | None:
        found = self._kept.get(question)
        if found is None:
            return None
        with suppress(KeyError):  # dropped by another thread just now
            self._kept.move_to_end(question)
        self._hits.inc()
        return found[0]

    def put(self, question: K, verdict: V, characters: int) -> None:
        """Keep a verdict; `characters` is the length of all its text and its question's."""
        size = 2 * characters + _OVERHEAD_BYTES
        self._drop(question)
        if size <= self._most:
            self._kept[question] = (verdict, size)
            self.bytes += size
            while self.bytes > self._most:
                self._drop(next(iter(self._kept)))
        self._gauge.set(self.bytes)

    async def ask(self, asked: K, work: Callable[[], Awaitable[V]]) -> V:
        """Have a question decided by `work`, together with others of the run who ask it now. Raises what that raises.

        The work is cancelled when the last who asked is.
        """
        question = asked, CURRENT_RUN.get()  # another run has its own place in the queue, perhaps far behind
        task = self._under_way.get(question)
        if task is None:
            self._misses.inc()
            task = self._under_way[question] = asyncio.create_task(_run(work))
            task.add_done_callback(lambda ended: self._ended(question, ended))
        else:
            self._shared.inc()
        self._asking[question] = self._asking.get(question, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            left = self._asking[question] - 1
            if left:
                self._asking[question] = left
            else:
                del self._asking[question]
                if not task.done():
                    # Gone from here at once, so that who asks next does not wait for what is being cancelled.
                    self._ended(question, task)
                    task.cancel()

    def _ended(self, question: Hashable, task: "asyncio.Task[V]") -> None:
        if self._under_way.get(question) is task:
            del self._under_way[question]
        if task.done() and not task.cancelled():
            task.exception()  # whoever asked has it

    def _drop(self, question: K) -> None:
        found = self._kept.pop(question, None)
        if found is not None:
            self.bytes -= found[1]


async def _run(work: Callable[[], Awaitable[V]]) -> V:
    return await work()


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
    answer: str | None
    reference: str
    policy: EqualityPolicy


class _Asked(NamedTuple):
    reference: str
    policy: EqualityPolicy


@dataclass(frozen=True, slots=True)
class _Judgment:
    """What a reference is, found without any answer."""

    is_text: bool = False
    bad: str = ""
    """Why it cannot be used; empty if it can."""


_PLAIN = _Judgment()


@dataclass(frozen=True, slots=True)
class Equality:
    """The relation, why, and how long the question waited for a worker."""

    relation: Relation
    reason: str
    queued_seconds: float = 0.0


class MathEquality:
    """Decides equality of answers; shared by all verifiers that compare mathematics."""

    def __init__(self, pool: WorkerPool, cache_bytes: int = 64 << 20):
        """`cache_bytes`: how much of what workers decided is remembered; an eighth of it is for references."""
        self._pool = pool
        self._decided: VerdictCache[_Question, Equality] = VerdictCache("math", cache_bytes - cache_bytes // 8)
        self._judged: VerdictCache[_Asked, _Judgment] = VerdictCache("math_references", cache_bytes // 8)

    def compare(
        self, answer: str | None, reference: str, policy: EqualityPolicy = STRICT
    ) -> Equality | Callable[[], Awaitable[Equality]]:
        """Return how `answer` stands to `reference`, or the work that finds out, to be called when there is room.

        The reference is judged by itself, once; what is found of it does not depend on the answer, nor on there being
        one: None is different from every usable reference.

        Raises:
            VerifierFailure: the reference is empty or cannot be used. The work raises it too: the reference cannot be
                used, or a worker died twice.
        """
        if policy.guards:
            answer, reference = answer and _last_box_or_all(answer), _unboxed(reference)
        if not reference.strip():
            raise VerifierFailure(
                reward_pb2.FAILURE_KIND_BAD_REFERENCE, "reference.answer is empty; it must hold an answer"
            )
        question, asked = _Question(answer, reference, policy), _Asked(reference, policy)
        judgment = _PLAIN if policy.guards and _is_plain(reference, policy) else self._judged.get(asked)
        if judgment is not None:
            return self._compare(question, judgment)

        async def later() -> Equality:
            found = self._compare(question, await self._judged.ask(asked, lambda: self._judge(asked)))
            return found if isinstance(found, Equality) else await found()

        return later

    def _compare(self, question: _Question, judgment: _Judgment) -> Equality | Callable[[], Awaitable[Equality]]:
        answer, reference, policy = question
        if judgment.bad:
            raise VerifierFailure(reward_pb2.FAILURE_KIND_BAD_REFERENCE, f"reference.answer: {judgment.bad}")
        if answer is None:
            return Equality(Relation.DIFFERENT, "no answer is given")
        longest = LONGEST_ANSWER if policy.guards else LONGEST_COMPLETION
        if len(answer) > max(longest, 2 * len(reference)):
            return Equality(Relation.DIFFERENT, f"the answer has {len(answer)} characters; {longest} are compared")
        equal = None
        if judgment.is_text or (policy.guards and answer.split() == reference.split()):
            equal = answer.split() == reference.split()
        elif policy.guards and max(len(answer), len(reference)) <= _LONGEST_PLAIN:
            equal = _decide_here(answer, reference, policy)
        if equal is not None:
            _EXACT.inc()
            return _equality(question, equal, Relation.SAME_TEXT if judgment.is_text else Relation.EQUAL)
        if (known := self._decided.get(question)) is not None:
            metrics.EQUALITY_DECISIONS.labels("cache").inc()
            return known
        return lambda: self._decided.ask(question, lambda: self._ask_worker(question))

    async def _judge(self, asked: _Asked) -> _Judgment:
        try:
            message = (await self._run({"reference": asked.reference, "policy": asked.policy.as_request()})).message
        except TaskTimedOut as error:
            message = {"event": "bad_reference", "reason": f"reading '{asked.reference[:80]}' was {error}"}
        except WorkerDied as error:
            raise _died(error) from error
        match message["event"]:
            case "judged":
                judgment = _Judgment(is_text=message["is_text"])
            case "bad_reference":
                judgment = _Judgment(bad=message["reason"])
            case "out_of_memory":  # which may be a truth about the worker's long life
                return _Judgment(bad=f"reading '{asked.reference[:80]}' took more memory than allowed")
            case _:
                raise VerifierFailure(
                    reward_pb2.FAILURE_KIND_VERIFIER_CRASHED,
                    f"the math worker failed: {message.get('reason', message)}",
                )
        self._judged.put(asked, judgment, len(asked.reference) + len(judgment.bad))
        return judgment

    async def _ask_worker(self, question: _Question) -> Equality:
        metrics.EQUALITY_DECISIONS.labels("worker").inc()
        request = {
            "reference": question.reference,
            "answer": question.answer,
            "policy": question.policy.as_request(),
        }
        try:
            reply = await self._run(request)
        except TaskTimedOut as error:
            return Equality(Relation.TIMED_OUT, f"comparing the answer was {error}", error.queued_seconds)
        except WorkerDied as error:
            if error.crashed:
                return Equality(Relation.OUT_OF_MEMORY, f"comparing the answer ended its worker twice: {error}")
            raise _died(error) from error
        if reply.message["event"] != "done":
            # Which may be a truth about the worker's long life: it is not remembered.
            reason = "evaluating the answer took more memory than allowed"
            return Equality(Relation.OUT_OF_MEMORY, reason, reply.queued_seconds)
        kept = _equality(question, reply.message["equal"])
        self._decided.put(question, kept, len(question.answer or "") + len(question.reference) + len(kept.reason))
        return replace(kept, queued_seconds=reply.queued_seconds)

    async def _run(self, request: dict) -> Reply:
        """Have a worker do a task, another one if the first dies. Raises TaskTimedOut, WorkerDied, VerifierFailure."""
        try:
            try:
                return await self._pool.run(request)
            except WorkerDied as error:
                log.warning("a worker died (%s); the task is tried once more", error)
                return await self._pool.run(request)
        except PoolClosed as error:
            raise VerifierFailure(reward_pb2.FAILURE_KIND_SHUT_DOWN, str(error)) from error


def _is_plain(reference: str, policy: EqualityPolicy) -> bool:
    if len(reference) > _LONGEST_PLAIN:
        return False
    return parse_rational(reference) is not None or read(reference, policy.bare_braces).is_plain


def _decide_here(answer: str, reference: str, policy: EqualityPolicy) -> bool | None:
    found, expected = parse_rational(answer), parse_rational(reference)
    if found is not None and expected is not None and "$" not in answer + reference:
        equal = equal_rationals(found, expected, policy.decimal_places)
        if equal is not None:
            return equal
    return Comparison(policy).equal(read(answer, policy.bare_braces), read(reference, policy.bare_braces))


def _equality(question: _Question, equal: bool, relation: Relation = Relation.EQUAL) -> Equality:
    answer, reference = (question.answer or "")[:80], question.reference[:80]
    if equal:
        return Equality(relation, f"{answer} is {reference}")
    return Equality(Relation.DIFFERENT, f"{answer} is not {reference}")


def _died(error: WorkerDied) -> VerifierFailure:
    return VerifierFailure(reward_pb2.FAILURE_KIND_VERIFIER_CRASHED, f"the math worker died twice: {error}")


def _last_box_or_all(answer: str) -> str:
    box = last_boxed(answer) if "\\" in answer else None
    return (answer if box is None else box).strip()


def _unboxed(reference: str) -> str:
    """A reference of one box is what the box holds; one of several ("\\boxed{1} and \\boxed{2}") means them all."""
    reference = reference.strip()
    box = last_boxed(reference) if reference.startswith("\\boxed") else None
    return box if box is not None and reference == rf"\boxed{{{box}}}" else reference
