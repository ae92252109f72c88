"""Equality of mathematical answers: plain cases are decided in this process, the others by a killable worker."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from quartet.v1 import reward_pb2

from quartet_reward import metrics
from quartet_reward.answer_extraction import last_boxed
from quartet_reward.begun import admitted
from quartet_reward.errors import BadReference, VerifierCrashed
from quartet_reward.math.compare import STRICT, Comparison, EqualityPolicy, Unevaluated
from quartet_reward.math.fast import parse_rational
from quartet_reward.math.forms import Kind, read
from quartet_reward.math.notation import tokens
from quartet_reward.math.spelling import plain
from quartet_reward.queue import CURRENT_RUN, count_wait
from quartet_reward.workers.pool import TaskTimedOut, WorkerPool
from quartet_server.worker_process import WorkerCommand, WorkerDied

Q = TypeVar("Q", bound=Hashable)
V = TypeVar("V")

# Memory of a cache entry beside its text.
_OVERHEAD_BYTES = 600

# Longer answers are wrong: no honest one is longer, and symbolic parsing takes superlinear time.
LONGEST_ANSWER = 2_000
# "east" and "John Smith" are answers; a longer run of words is a sentence.
_MOST_WORDS = 3
# Longer texts are parsed by a worker, which can be killed.
_LONGEST_PLAIN = 400
_AS_MATHEMATICS, _AS_TEXT = map(metrics.REFERENCES.labels, ("mathematics", "text"))
_EXACT = metrics.EQUALITY_DECISIONS.labels("exact")


@dataclass(eq=False, slots=True)
class _Shared(Generic[V]):
    work: asyncio.Task[V]
    callers: int = 0


class VerdictCache(Generic[Q, V]):
    """An LRU cache of verdicts by question; concurrent equal questions of a run share one computation."""

    def __init__(self, most_bytes: int):
        """`most_bytes`: 0 disables the cache."""
        self._most = most_bytes
        self._cached: OrderedDict[Q, tuple[V, int]] = OrderedDict()
        self._running: dict[Hashable, _Shared[V]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._cached)

    def get(self, question: Q) -> V | None:
        found = self._cached.get(question)
        if found is None:
            return None
        with suppress(KeyError):  # another thread has just evicted it
            self._cached.move_to_end(question)
        return found[0]

    def put(self, question: Q, verdict: V, characters: int) -> None:
        """Cache a verdict; `characters` is the length of its text and its question's together."""
        size = 2 * characters + _OVERHEAD_BYTES
        if size > self._most or question in self._cached:
            return
        self._cached[question] = (verdict, size)
        self.bytes += size
        while self.bytes > self._most:
            _, (_, evicted) = self._cached.popitem(last=False)
            self.bytes -= evicted

    async def compute(self, question: Q, work: Callable[[Q], Coroutine[Any, Any, V]]) -> V:
        """Return the result of `work(question)`, shared with the run's concurrent calls for the same question.

        Raises what `work` raises. The work is cancelled when all its callers are.
        """
        await admitted()
        key = question, CURRENT_RUN.get()  # not shared between runs: another run may be far behind in the queue
        began, shared = time.monotonic(), self._running.get(key)
        first = shared is None
        if shared is None:
            shared = self._running[key] = _Shared(asyncio.create_task(work(question)))
        shared.callers += 1
        try:
            return await asyncio.shield(shared.work)
        finally:
            if not first:
                count_wait(time.monotonic() - began)
            shared.callers -= 1
            if not shared.callers:
                del self._running[key]
                shared.work.cancel()


class _Question(NamedTuple):
    answer: str | None
    """None: is the reference usable?"""
    reference: str
    policy: EqualityPolicy


@dataclass(frozen=True, slots=True)
class _Judgment:
    """Whether a reference is usable, which does not depend on any answer."""

    is_text: bool = False
    bad: str = ""
    """Why it cannot be used; empty if it can."""


_PLAIN = _Judgment()


@dataclass(frozen=True, slots=True)
class Equality:
    """Whether an answer equals the reference, and why."""

    outcome: int
    """CORRECT, INCORRECT; UNEVALUATED: equal, but it leaves something to compute; TIMED_OUT, RESOURCE_EXCEEDED:
    evaluating the answer exceeded a worker's limits."""
    reason: str
    as_text: bool = False
    """The reference is not mathematics; the answer had to be the same text (ColossalChat's string fallback)."""
    reference_is_text: bool = False
    """That, or the reference is a sentence, whatever the answer."""


def worker_command(memory_bytes: int) -> WorkerCommand:
    """Return the command of a math worker with so much address space."""
    # With gmpy2, sympy would evaluate huge powers that it leaves alone with Python's integers.
    variables = {"SYMPY_GROUND_TYPES": "python"}
    return WorkerCommand("quartet_reward.math.worker", [f"--memory-bytes={memory_bytes}"], variables)


class MathEquality:
    """Decides equality of answers; shared by all verifiers that compare mathematics."""

    def __init__(self, pool: WorkerPool, cache_bytes: int = 64 << 20):
        """`cache_bytes`: size of the cache of workers' verdicts; an eighth of it is for references."""
        self._pool = pool
        self._decided: VerdictCache[_Question, Equality] = VerdictCache(cache_bytes - cache_bytes // 8)
        self._judged: VerdictCache[_Question, _Judgment] = VerdictCache(cache_bytes // 8)

    async def compare(self, answer: str | None, reference: str, policy: EqualityPolicy = STRICT) -> Equality:
        """Return whether `answer` equals `reference`; plain cases without waiting.

        The reference is judged once, independently of the answer. `answer` None (none was given) is never equal, but
        the reference is judged all the same.

        Raises:
            VerifierFailure: the reference is empty or unusable, or a worker died twice.
        """
        answer, reference = answer and _last_box_or_all(answer), unboxed(reference)
        if not reference.strip():
            raise BadReference("reference.answer is empty; it must hold an answer")
        question, asked = _Question(answer, reference, policy), _Question(None, reference, policy)
        judgment = _PLAIN if is_plain(reference, policy) else self._judged.get(asked)
        if judgment is None:
            judgment = await self._judged.compute(asked, self._judge)
        if judgment.bad:
            raise BadReference(f"reference.answer: {judgment.bad}")
        text = judgment.is_text or is_sentence(reference, policy)
        (_AS_TEXT if text else _AS_MATHEMATICS).inc()
        equality = await self._compare(question, judgment)
        return replace(equality, reference_is_text=True) if text else equality

    async def _compare(self, question: _Question, judgment: _Judgment) -> Equality:
        answer, reference, policy = question
        if answer is None:
            return Equality(reward_pb2.OUTCOME_INCORRECT, "no answer is given")
        if len(answer) > max(LONGEST_ANSWER, 2 * len(reference)):
            reason = f"the answer has {len(answer)} characters; {LONGEST_ANSWER} are compared"
            return Equality(reward_pb2.OUTCOME_INCORRECT, reason)
        equal: bool | None = answer.split() == reference.split() or None
        left = ""
        if judgment.is_text:
            equal = bool(equal) or _same_text(answer, reference)
        elif equal is None and max(len(answer), len(reference)) <= _LONGEST_PLAIN:
            try:
                equal = _decide_here(answer, reference, policy)
            except Unevaluated as unevaluated:
                equal, left = True, str(unevaluated)
        if equal is not None:
            _EXACT.inc()
            return _equality(question, equal, left, as_text=judgment.is_text)
        if (known := self._decided.get(question)) is not None:
            metrics.EQUALITY_DECISIONS.labels("cache").inc()
            return known
        return await self._decided.compute(question, self._ask_worker)

    async def _judge(self, asked: _Question) -> _Judgment:
        try:
            message = await self._pool.run({"reference": asked.reference, "policy": asked.policy.model_dump()})
        except TaskTimedOut as error:
            message = {"event": "bad_reference", "reason": f"reading '{asked.reference[:80]}' was {error}"}
        except WorkerDied as error:
            raise _worker_failed(error) from error
        match message["event"]:
            case "judged":
                judgment = _Judgment(is_text=message["is_text"])
            case "bad_reference":
                judgment = _Judgment(bad=message["reason"])
            case "out_of_memory":  # not cached: earlier tasks may have used up the worker's memory
                return _Judgment(bad=f"reading '{asked.reference[:80]}' took more memory than allowed")
            case _:
                raise _worker_failed(message.get("reason", message))
        self._judged.put(asked, judgment, len(asked.reference) + len(judgment.bad))
        return judgment

    async def _ask_worker(self, question: _Question) -> Equality:
        metrics.EQUALITY_DECISIONS.labels("worker").inc()
        request = {
            "reference": question.reference,
            "answer": question.answer,
            "policy": question.policy.model_dump(),
        }
        try:
            reply = await self._pool.run(request)
        except TaskTimedOut as error:
            return Equality(reward_pb2.OUTCOME_TIMED_OUT, f"comparing the answer was {error}")
        except WorkerDied as error:
            if error.crashed:
                reason = f"comparing the answer ended its worker twice: {error}"
                return Equality(reward_pb2.OUTCOME_RESOURCE_EXCEEDED, reason)
            raise _worker_failed(error) from error
        if reply["event"] == "out_of_memory":  # not cached: earlier tasks may have used up the worker's memory
            reason = "evaluating the answer took more memory than allowed"
            return Equality(reward_pb2.OUTCOME_RESOURCE_EXCEEDED, reason)
        if reply["event"] != "done":
            raise _worker_failed(reply.get("reason", reply))
        verdict = _equality(question, reply["equal"], reply["left"])
        self._decided.put(question, verdict, len(question.answer or "") + len(question.reference) + len(verdict.reason))
        return verdict


def is_sentence(reference: str, policy: EqualityPolicy) -> bool:
    """Return whether a reference has a run of words that an answer would have to repeat, unlike "east"."""
    if len(reference.split()) <= _MOST_WORDS:
        return False
    leaves = read(reference, policy.bare_braces).leaves()
    return any(leaf.kind is Kind.WORDS and len(leaf.text.split()) > _MOST_WORDS for leaf in leaves)


def is_plain(reference: str, policy: EqualityPolicy) -> bool:
    """Return whether a reference is usable for certain, so that no worker has to judge it."""
    if len(reference) > _LONGEST_PLAIN:
        return False
    return parse_rational(reference) is not None or read(reference, policy.bare_braces).is_plain


def _decide_here(answer: str, reference: str, policy: EqualityPolicy) -> bool | None:
    comparison = Comparison(policy)
    numbers = parse_rational(answer) is not None and parse_rational(reference) is not None
    if numbers and "$" not in answer + reference and (equal := comparison.expressions(answer, reference)) is not None:
        return equal
    return comparison.equal(read(answer, policy.bare_braces), read(reference, policy.bare_braces))


def _same_text(answer: str, reference: str) -> bool:
    """Return whether two texts are the same but for white space, capitals and the spelling of LaTeX."""
    if max(len(answer), len(reference)) > _LONGEST_PLAIN:
        return False
    return tokens(plain(answer).casefold()) == tokens(plain(reference).casefold())


def _equality(question: _Question, equal: bool, left: str = "", as_text: bool = False) -> Equality:
    answer, reference = (question.answer or "")[:80], question.reference[:80]
    if left:
        reason = f"{answer} is {reference}, but it leaves {left} to compute; the parameter unevaluated allows that"
        return Equality(reward_pb2.OUTCOME_UNEVALUATED, reason)
    outcome = reward_pb2.OUTCOME_CORRECT if equal else reward_pb2.OUTCOME_INCORRECT
    return Equality(outcome, f"{answer} is {'' if equal else 'not '}{reference}", as_text=as_text)


def _worker_failed(reason: object) -> VerifierCrashed:
    return VerifierCrashed(f"the math worker failed: {reason}")


def _last_box_or_all(answer: str) -> str:
    box = last_boxed(answer) if "\\" in answer else None
    return (answer if box is None else box).strip()


def unboxed(reference: str) -> str:
    """Return the content of a reference that is one box; several ("\\boxed{1} and \\boxed{2}") are kept as they are."""
    reference = reference.strip()
    box = last_boxed(reference) if reference.startswith("\\boxed") else None
    return box if box is not None and reference == rf"\boxed{{{box}}}" else reference
