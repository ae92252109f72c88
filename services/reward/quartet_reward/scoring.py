"""Scores an item: runs its verifiers and combines their verdicts into one result."""

import asyncio
import math
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from quartet.v1 import reward_pb2

from quartet_common import tracing
from quartet_common.durations import to_duration
from quartet_common.errors import invalid_argument
from quartet_common.log import get_logger
from quartet_common.text import encodable
from quartet_common.values import LARGEST_FLOAT32
from quartet_reward import metrics
from quartet_reward.begun import Begun, admitted
from quartet_reward.errors import InvalidItem, VerifierCrashed, VerifierFailure
from quartet_reward.queue import CURRENT_RUN, WAITED
from quartet_reward.verifiers.base import Tools, Verdict
from quartet_reward.verifiers.registry import BoundVerifier, SpecReader

log = get_logger(__name__)

LONG_BYTES = 1 << 16
_MOST_PLACES = 256
_LONGEST_TEXT = 1000
_LONGEST_ITEM_ID = 256

Result: TypeAlias = reward_pb2.ScoreResult


class _Finding(NamedTuple):
    verdict: Verdict
    part: reward_pb2.VerifierScore


class Scoring:
    """An item's scoring, done but for what has to wait for admission to the queue."""

    def __init__(self, run: str, size: int, waited: list[float], score: Coroutine[Any, Any, Result]):
        self._run, self._waited = run, waited
        self.places = max(1, min(size // LONG_BYTES, _MOST_PLACES))
        """Admission places of the rest, one per `LONG_BYTES`, so that waiting items are bounded in bytes too."""
        self._begun = Begun(score)
        self._since = time.perf_counter()

    @property
    def result(self) -> Result | None:
        """None: `finish` finds it."""
        return self._begun.result

    async def finish(self) -> Result:
        """Do the rest, in a task of its own. Does not raise, as a failure is a result too."""
        self._waited[0] += time.perf_counter() - self._since
        CURRENT_RUN.set(self._run)  # visible in this task only
        WAITED.set(self._waited)
        return await self._begun


class Scorer:
    """Scores items, in place where no verifier has to wait."""

    def __init__(self, specs: SpecReader, tools: Tools):
        self._specs = specs
        self._tools = tools
        self._raised: set[str] = set()
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-items")

    def begin(self, item: reward_pb2.ScoreItem, field: str, size: int) -> Scoring:
        """Begin to score an item.

        An item of more than `LONG_BYTES` waits for a thread, so that it does not block the event loop.

        Args:
            field: the item's field in the request, for errors.
            size: `item.ByteSize()`; the caller has it, and computing it costs as much as serializing the item.

        Raises:
            ContractError: INVALID_ARGUMENT with the field under `field` that is not acceptable.
        """
        waited = [0.0]
        return Scoring(item.run_id, size, waited, self._score(item, field, size, waited))

    async def _score(self, item: reward_pb2.ScoreItem, field: str, size: int, waited: list[float]) -> Result:
        try:
            bound = self._read(item, field)
        except VerifierFailure as error:
            return failure(item.item_id, error)
        began = time.time()
        if size <= LONG_BYTES:
            result = await self._verify(item, bound, waited)
        else:
            await admitted()
            loop = asyncio.get_running_loop()
            begun = await loop.run_in_executor(self._long, Begun, self._verify(item, bound, waited))
            result = begun.result or await begun
        if item.traceparent and tracing.enabled():
            _trace(item, result, began)
        return result

    def _read(self, item: reward_pb2.ScoreItem, field: str) -> list[BoundVerifier]:
        if not 1 <= len(item.item_id) <= _LONGEST_ITEM_ID:
            raise invalid_argument(
                f"{field}.item_id", f"{len(item.item_id)} characters", f"1 to {_LONGEST_ITEM_ID} characters"
            )
        if not item.verifiers:
            raise invalid_argument(f"{field}.verifiers", "none", "at least one")
        return [self._specs.read(spec, f"{field}.verifiers[{i}]") for i, spec in enumerate(item.verifiers)]

    async def _verify(self, item: reward_pb2.ScoreItem, bound: list[BoundVerifier], waited: list[float]) -> Result:
        """Run the verifiers one after the other: few items have more than one, and items run concurrently.

        `waited`: the seconds that the item has waited, which do not count as verification.
        """
        began, before_all = time.perf_counter(), waited[0]
        findings: list[_Finding] = []
        for one in bound:
            start, before = time.perf_counter(), waited[0]
            try:
                verdict = await one.verifier.verify(item, one.parameters, self._tools)
                findings.append(_checked(verdict, start + waited[0] - before, one))
            except BaseException as error:
                return self._failed(item, one, error, start)
        elapsed = time.perf_counter() - began - (waited[0] - before_all)
        return _combined(item.item_id, bound, findings, max(elapsed, 0.0))

    def _failed(self, item: reward_pb2.ScoreItem, one: BoundVerifier, error: BaseException, start: float) -> Result:
        """Return the failure of an item whose verifier raised. Reraises what ends the call or the process."""
        if _is_from_outside(error):
            raise error
        name = one.verifier.name
        if not isinstance(error, VerifierFailure):
            raised, error = error, VerifierFailure.of_exception(name, type(one.verifier).__module__, error)
            if error.place in self._raised:
                log.debug("%s", error.message, extra={"place": error.place})
            else:  # log the traceback once per place: it may be raised on every item
                self._raised.add(error.place)
                log.error("%s", error.message, exc_info=raised, extra={"place": error.place})
        metrics.VERIFICATIONS.labels(name, metrics.failure_name(error.kind)).observe(time.perf_counter() - start)
        return failure(item.item_id, error)


def _trace(item: reward_pb2.ScoreItem, result: Result, began: float) -> None:
    """Record a trace span from `began` (time.time()) until now, waiting included."""
    attributes: dict[str, tracing.Value] = {"quartet.run": item.run_id}
    attributes["quartet.verifiers"] = ", ".join(spec.name for spec in item.verifiers)
    if result.HasField("score"):
        attributes["quartet.reward"] = result.score.reward
        attributes["quartet.outcome"] = metrics.outcome_name(result.score.outcome)
    else:
        attributes["quartet.failure"] = metrics.failure_name(result.failure.kind)
    tracing.record("verify", item.traceparent, began, kind="server", attributes=attributes)


def failure(item_id: str, error: VerifierFailure) -> Result:
    return Result(
        item_id=item_id,
        failure=reward_pb2.Failure(
            kind=error.kind,
            message=encodable(error.message, _LONGEST_TEXT),
            retryable=error.retryable,
            place=encodable(error.place),
            traceback=encodable(error.traceback),
        ),
    )


def _is_from_outside(error: BaseException) -> bool:
    """Return whether an error ends the call or the process.

    A verifier may raise SystemExit or CancelledError by itself: these are failures of its item.
    """
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # in the thread of long items there are no tasks
            return False
        return task is None or task.cancelling() > 0
    return not isinstance(error, Exception | SystemExit)


def _checked(verdict: Verdict, start: float, one: BoundVerifier) -> _Finding:
    """Return the verdict with its part of the score. Raises if the verdict has values of other types or not finite."""
    numbers = {
        "reward": verdict.reward or 0.0,
        "format_acc": verdict.format_acc or 0.0,
        "ans_acc": verdict.ans_acc or 0.0,
    }
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ValueError(f"its {name} is {number}; it must be finite")
    verdict = replace(
        verdict,
        reason=encodable(verdict.reason, _LONGEST_TEXT),
        parsed_answer=encodable(verdict.parsed_answer, _LONGEST_TEXT),
    )
    part = reward_pb2.VerifierScore(
        name=one.verifier.name,
        reward=verdict.reward or 0.0,
        outcome=verdict.outcome,
        reason=verdict.reason,
        tests_passed=verdict.tests_passed,
        tests=verdict.tests,
        weight=one.weight,
        reads=getattr(one.verifier, "reads", ("gt_answer",)),
        reference_is_text=verdict.reference_is_text,
    )
    seconds = max(time.perf_counter() - start, 0.0)
    metrics.VERIFICATIONS.labels(one.verifier.name, metrics.outcome_name(verdict.outcome)).observe(seconds)
    return _Finding(verdict, part)


def _combined(item_id: str, bound: list[BoundVerifier], findings: list[_Finding], elapsed: float) -> Result:
    judged = [(one.weight, finding) for one, finding in zip(bound, findings, strict=True)]
    judged = [(weight, finding) for weight, finding in judged if finding.verdict.reward is not None]
    if not judged:
        return failure(item_id, InvalidItem("no verifier has a verdict"))
    weights, verdicts = [weight for weight, _ in judged], [finding.verdict for _, finding in judged]
    rewards = [weight * (verdict.reward or 0.0) for weight, verdict in zip(weights, verdicts, strict=True)]
    if not abs(total := sum(rewards)) <= LARGEST_FLOAT32:
        message = f"the weighted sum of the rewards is {total:g}, beyond {LARGEST_FLOAT32:g}, the largest float32"
        return failure(item_id, VerifierCrashed(message))
    accuracies = [verdict.ans_acc for verdict in verdicts]
    if all(accuracy is None for accuracy in accuracies):
        accuracies = [_by_outcome(verdict) for verdict in verdicts]
    for (_, finding), accuracy in zip(judged, accuracies, strict=True):
        if accuracy is not None:
            finding.part.ans_acc = accuracy
    judges = [verdict for verdict, accuracy in zip(verdicts, accuracies, strict=True) if accuracy is not None]
    leading = (judges or verdicts)[0]
    score = reward_pb2.Score(
        reward=math.fsum(rewards),
        format_acc=_mean(weights, [verdict.format_acc for verdict in verdicts]),
        ans_acc=_mean(weights, accuracies),
        unjudged=not judges,
        outcome=leading.outcome,
        parsed_answer=leading.parsed_answer,
        reason=leading.reason,
        verifiers=[finding.part for finding in findings],
        elapsed=to_duration(elapsed),
    )
    return Result(item_id=item_id, score=score)


def _by_outcome(verdict: Verdict) -> float | None:
    """Return the accuracy that follows from a verdict's outcome; None if the verifier does not judge answers."""
    if verdict.format_acc is not None or verdict.outcome == reward_pb2.OUTCOME_UNJUDGED:
        return None
    return float(verdict.outcome == reward_pb2.OUTCOME_CORRECT)


def _mean(weights: list[float], values: list[float | None]) -> float:
    """Return the mean of the values that are not None, weighted by their absolute weights; 0 if there are none."""
    judged = [(abs(weight), value) for weight, value in zip(weights, values, strict=True) if value is not None]
    total = sum(weight for weight, _ in judged)
    return sum(weight * value for weight, value in judged) / total if total else 0.0
