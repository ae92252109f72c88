"""Checks the references of the data before a start: those that no right answer can match, or that cannot be used."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pydantic import ValidationError
from quartet.v1 import reward_pb2

from quartet_common.config import LoadedConfig
from quartet_common.errors import ContractError
from quartet_common.references import answer_text, is_program, program_text, read_cases
from quartet_common.sections import VerifierSection, by_name
from quartet_common.text import encodable
from quartet_reward.code.tests import read_tests
from quartet_reward.config import RewardSection
from quartet_reward.errors import BadReference, VerifierFailure
from quartet_reward.math.compare import STRICT, EqualityPolicy
from quartet_reward.math.equality import is_plain, is_sentence, unboxed, worker_command
from quartet_reward.math.extract import ReadingPolicy, reference_answer
from quartet_reward.verifiers import answers
from quartet_reward.verifiers.answers import MathParameters
from quartet_reward.verifiers.base import Parameters
from quartet_reward.verifiers.registry import SpecReader
from quartet_reward.workers.pool import TaskTimedOut, WorkerPool
from quartet_server.data_rows import data_rows
from quartet_server.worker_process import WorkerDied

_MATH = frozenset(verifier.name for verifier in answers.VERIFIERS)
_NO_REFERENCE = frozenset({"format", "length"})
"""Verifiers that judge no answer."""
# Of the references that need a worker, as many are read as there is time for, evenly spread.
_ASKED = 200
_SECONDS = 10.0
_START_SECONDS = 30.0
_SHOWN = 3
_LONGEST_SHOWN = 60

Policy = tuple[ReadingPolicy, EqualityPolicy]


class _Kind(Enum):
    """What a reference is."""

    MATHEMATICS = "mathematics"
    TEXT = "text"
    """Only the same text is equal to it."""
    UNUSABLE = "unusable"
    """Every item with it fails with BAD_REFERENCE."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """How a reference reads, and why, if it is unusable."""

    kind: _Kind
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Found:
    """A reference that is text or unusable."""

    where: str
    reference: str
    reading: _Reading
    alone: bool
    """No other verifier judges the answer."""


@dataclass(slots=True)
class _Source:
    """What is found of the references of a file."""

    read: int = 0
    sampled: bool = False
    open: list[tuple[str, str, Policy, bool]] = field(default_factory=list)
    """Those that a worker has to read: place, reference, policy, and whether no other verifier judges the answer."""
    found: list[_Found] = field(default_factory=list)

    def add(self, where: str, reference: str, reading: _Reading | None, alone: bool) -> None:
        self.read += 1
        if reading is not None and reading.kind is not _Kind.MATHEMATICS:
            self.found.append(_Found(where, reference, reading, alone))


def check_references(config: LoadedConfig[RewardSection], specs: SpecReader) -> tuple[list[str], list[str]]:
    """Read the references of all sources that this host has as the verifiers of their prompts do.

    Returns:
        A sentence on each source none of whose references can be used, and on each that has some of that kind.
    """
    sources = _sources(config, specs)
    if any(source.open for source in sources.values()):
        asyncio.run(_ask(list(sources.values()), config.section))
    errors: list[str] = []
    warnings: list[str] = []
    for path, source in sources.items():
        for kind in (_Kind.UNUSABLE, _Kind.TEXT):
            if found := [each for each in source.found if each.reading.kind is kind]:
                hopeless = len(source.found) == source.read and all(each.alone for each in source.found)
                (errors if hopeless else warnings).append(_sentence(path, source, kind, found))
    return errors, warnings


def _sources(config: LoadedConfig[RewardSection], specs: SpecReader) -> dict[str, _Source]:
    """Return what can be told without a worker, by file."""
    sources: dict[str, _Source] = defaultdict(_Source)
    own = _bound(specs, config.run.verifiers)
    bound: dict[str, list[tuple[str, Parameters]]] = {}
    read: dict[tuple[str, Policy], _Reading | None] = {}
    for where, row in data_rows(config.data):
        verifiers = own
        if given := row.get("verifiers"):
            key = repr(given)
            verifiers = bound[key] if key in bound else bound.setdefault(key, _bound(specs, _sections(given)))
        reference = _reference(row)
        judging = [(name, parameters) for name, parameters in verifiers if name not in _NO_REFERENCE]
        if reference is None or not judging:
            continue
        source = sources[where.rpartition(", line ")[0]]
        policies = {_policy(parameters): None for name, parameters in judging if name in _MATH}
        for policy in policies:
            alone = all(name in _MATH for name, _ in judging)
            question = reference.answer, policy
            if question not in read:
                read[question] = _read_here(reference.answer, *policy)
            if read[question] is None:
                source.open.append((where, reference.answer, policy, alone))
            else:
                source.add(where, reference.answer, read[question], alone)
        if any(name == "code" for name, _ in judging):
            alone = len(judging) == 1
            try:
                read_tests(reference)
                source.add(where, "", None, alone)
            except BadReference as error:
                source.add(where, "", _Reading(_Kind.UNUSABLE, error.message), alone)
    return sources


def _read_here(reference: str, reading: ReadingPolicy, equality: EqualityPolicy) -> _Reading | None:
    """Return how a reference reads, or None if a worker has to decide: see `_read_by_worker`."""
    answer = unboxed(reference_answer(reference, reading))
    if not answer.strip():
        return _Reading(_Kind.UNUSABLE, "it is empty")
    if not is_plain(answer, equality):
        return None
    return _Reading(_Kind.TEXT if is_sentence(answer, equality) else _Kind.MATHEMATICS)


async def _ask(sources: Sequence[_Source], section: RewardSection) -> None:
    """Have a worker read the references that need one, as many as there is time for."""
    seconds = min(section.deadline_seconds, _SECONDS / 2)
    pool = WorkerPool("math", worker_command(section.worker_memory_bytes), seconds, _START_SECONDS)
    pool.start()
    for source in sources:
        source.sampled = bool(source.open)
    try:
        with suppress(TimeoutError, WorkerDied):  # what is read until then is told
            await pool.run({"reference": "1", "policy": STRICT.model_dump()})
            async with asyncio.timeout(_SECONDS):
                for source in sources:
                    step = -(-len(source.open) * len(sources) // _ASKED) or 1
                    for where, reference, policy, alone in source.open[::step]:
                        source.add(where, reference, await _read_by_worker(pool, reference, *policy), alone)
                    source.sampled = step > 1
    finally:
        await pool.close()


async def _read_by_worker(
    pool: WorkerPool, reference: str, reading: ReadingPolicy, equality: EqualityPolicy
) -> _Reading | None:
    """Return how a reference reads; None: the worker could not tell. Raises WorkerDied."""
    answer = unboxed(reference_answer(reference, reading))
    try:
        message = await pool.run({"reference": answer, "policy": equality.model_dump()})
    except TaskTimedOut as error:
        return _Reading(_Kind.UNUSABLE, f"reading it was {error}")
    match message["event"]:
        case "judged":
            return _Reading(_Kind.TEXT if message["is_text"] else _Kind.MATHEMATICS)
        case "bad_reference":
            return _Reading(_Kind.UNUSABLE, message["reason"])
    return None


def _sections(given: Any) -> Iterator[VerifierSection]:
    for one in given if isinstance(given, list) else ():
        with suppress(ValidationError):
            yield VerifierSection.model_validate(by_name(one))


def _bound(specs: SpecReader, sections: Any) -> list[tuple[str, Parameters]]:
    """Return the verifiers and their parameters; those that are refused are reported elsewhere."""
    found = []
    for one in sections:
        with suppress(ContractError, VerifierFailure):
            bound = specs.bind(one.spec_name, one.weight, one.parameters, "")
            found.append((bound.verifier.name, bound.parameters))
    return found


def _policy(parameters: Parameters) -> Policy:
    if isinstance(parameters, MathParameters):
        return parameters.reading, parameters.equality
    return ReadingPolicy(), STRICT


def _reference(row: Mapping[str, Any]) -> reward_pb2.Reference | None:
    """Return a row's reference; None if it has none, or one that the client refuses."""
    try:
        cases, name = row.get("test_cases"), row.get("entry_point") or ""
        program = program_text(row.get("test_program") or (cases if is_program(cases) else ""))
        table = read_cases(cases, name) if cases and not is_program(cases) else {}
        tests = zip(table.get("inputs", ()), table.get("outputs", ()), strict=True)
        reference = reward_pb2.Reference(
            answer=answer_text(row.get("gt_answer", "")),
            test_cases=[reward_pb2.TestCase(input=given, output=expected) for given, expected in tests],
            test_program=program,
            entry_point=name or table.get("fn_name", ""),
        )
    except (TypeError, ValueError):
        return None
    has_one = reference.answer.strip() or reference.test_cases or reference.test_program
    return reference if has_one else None


_CURES = {
    _Kind.TEXT: "text, not mathematics, so that only the same text is right: name the answer's column in `fields`, "
    "use the verifier 'exact', or for letters of a multiple-choice question the parameter choices of 'math'",
    _Kind.UNUSABLE: "unusable, so that completions get no reward: correct or leave out such rows, or use the verifier "
    "that they are for",
}


def _sentence(path: str, source: _Source, kind: _Kind, found: Sequence[_Found]) -> str:
    found = sorted(found, key=lambda each: int(each.where.rpartition(" ")[2]))
    shown = "; ".join(f"{each.where}: {each.reading.reason or _short(each.reference)}" for each in found[:_SHOWN])
    more = "; …" if len(found) > _SHOWN else ""
    of = f"{len(found):,} of {source.read:,} references" + (" (a sample)" if source.sampled else "")
    return f"{path}: {of} {'is' if len(found) == 1 else 'are'} {_CURES[kind]}: {shown}{more}"


def _short(reference: str) -> str:
    return repr(encodable(" ".join(reference.split()), _LONGEST_SHOWN))
