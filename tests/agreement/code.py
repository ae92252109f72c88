"""Agreement of the verifier `code`. Data, each file optional:

humaneval/HumanEval.jsonl.gz (or .jsonl)   {"task_id", "prompt", "canonical_solution", "test", "entry_point"}
mbpp/mbpp_sanitized_codet.jsonl            the same fields
mbpp/mbpp.jsonl                            {"task_id", "code", "test_setup_code", "test_list"}
contests/code_eval_code_contests.jsonl     {"id", "test": '[{"input": {"stdin": …}, "output": {"stdout": …}}, …]'}

References must pass; cheating programs, and mutants (a changed operator, constant or bound) that fail in plain Python,
must not.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quartet.v1 import reward_pb2

from tests.agreement import rows
from tests.agreement.mutants import plain_verdicts, sample_mutants
from tests.agreement.rows import Asker, Row, correct, read, reward_service

MUTANTS = 700
FEWEST_MUTANTS = 500
# For a reference's tests: enough even on a busy machine.
REFERENCE_SECONDS = 60.0
# For a mutant's tests: processor time in plain Python, wall time in the service. Some mutants never end.
MUTANT_SECONDS = 3.0
_LIAR = """
class Liar:
    def __getattr__(self, name): return Liar() if name[:2] != "__" else object.__getattribute__(self, name)
    def __eq__(self, other): return True
    def __contains__(self, other): return True
    def __len__(self): return 3
    def __iter__(self): return iter(())
    __getitem__ = __call__ = lambda self, *given: Liar()

def stop(): raise StopIteration

"""
_CHEATS = {
    "gives its last argument back": "lambda *given: given[-1] if given else None",
    "an object that lies": "lambda *given: Liar()",
    "raises StopIteration": "lambda *given: stop()",
}
_SHARE_OF_MBPP = 0.99
_MOST_SANITIZED_MISSED = 7


@dataclass(frozen=True)
class Problem:
    """A correct program and its assert-style tests."""

    name: str
    source: str
    test: str
    entry_point: str
    prefix: str = ""
    """The code before the completion, which may define helpers of the test."""


def measure(data: Path) -> Iterator[Row]:
    """Return the rows for the files in `data`."""
    humaneval = read_humaneval(data / "humaneval/HumanEval.jsonl.gz") + read_humaneval(
        data / "humaneval/HumanEval.jsonl"
    )
    sanitized = read_sanitized_mbpp(data / "mbpp/mbpp_sanitized_codet.jsonl")
    full = read_mbpp(data / "mbpp/mbpp.jsonl")
    contests = read(data / "contests/code_eval_code_contests.jsonl")
    if not (humaneval or sanitized or full or contests):
        return
    with reward_service("reward.sandbox.slots=4") as asker:
        for name, problems, least in (
            ("HumanEval", humaneval, len(humaneval)),
            ("MBPP, sanitized", sanitized, len(sanitized) - _MOST_SANITIZED_MISSED),
            ("MBPP", full, int(_SHARE_OF_MBPP * len(full))),
        ):
            if problems:
                cases = [(problem.name, item_of(problem, timeout_seconds=REFERENCE_SECONDS)) for problem in problems]
                yield asker.compare(f"{name}: references pass", cases, correct, least)
        if contests:
            yield from _contests(contests, asker)
        if humaneval or sanitized:
            yield _cheats(humaneval + sanitized, asker)
            yield from _mutants(humaneval + sanitized, asker)


def read_humaneval(path: Path) -> list[Problem]:
    """Return the problems of a file in HumanEval's format; none if there is no such file."""
    return [
        Problem(
            row["task_id"], row["prompt"] + row["canonical_solution"], row["test"], row["entry_point"], row["prompt"]
        )
        for row in read(path)
    ]


def read_sanitized_mbpp(path: Path) -> list[Problem]:
    """Return the problems of a file in CodeT's format of MBPP; none if there is no such file.

    Its prompts' docstrings are removed, because they are indented differently from the solutions' bodies.
    """
    problems = []
    for row in read(path):
        head, _, rest = row["prompt"].partition("\n    '''")
        after = rest.partition("'''")[2]
        source = head + "\n" + after.lstrip("\n") + row["canonical_solution"]
        problems.append(Problem(row["task_id"], source, row["test"], row["entry_point"]))
    return problems


def read_mbpp(path: Path) -> list[Problem]:
    """Return the problems of a file in MBPP's format; none if there is no such file."""
    return [
        Problem(f"MBPP/{row['task_id']}", row["code"], "\n".join([row["test_setup_code"], *row["test_list"]]), "")
        for row in read(path)
    ]


def item_of(problem: Problem, source: str | None = None, **parameters: Any) -> reward_pb2.ScoreItem:
    """Return the score item of a problem with its own program, or with another one."""
    reference = reward_pb2.Reference(test_program=problem.test, entry_point=problem.entry_point)
    return _item(problem.source if source is None else source, reference, prefix=problem.prefix, **parameters)


def _item(source: str, reference: reward_pb2.Reference, **parameters: Any) -> reward_pb2.ScoreItem:
    return rows.item_of("code", f"Here it is:\n```python\n{source}\n```\n", reference, parameters)


def _contests(problems: Sequence[dict[str, Any]], asker: Asker) -> Iterator[Row]:
    """These have no solutions: a program that prints all outputs must pass, one with a wrong output must not."""
    right, wrong = [], []
    for row in problems:
        pairs = [(case["input"]["stdin"], case["output"]["stdout"]) for case in json.loads(row["test"])]
        spoilt = [*pairs[:-1], (pairs[-1][0], pairs[-1][1].rstrip() + "0")]
        reference = reward_pb2.Reference()
        for given, expected in pairs:
            reference.test_cases.add(input=given, output=expected)
        for cases, table in ((right, dict(pairs)), (wrong, dict(spoilt))):
            program = f"import sys\ntable = {table!r}\nsys.stdout.write(table[sys.stdin.read()])"
            cases.append((f"problem {row['id']}", _item(program, reference)))
    yield asker.compare("contests: all outputs right", right, correct)
    yield asker.compare(
        "contests: the last output wrong",
        wrong,
        lambda result: result.score.outcome == reward_pb2.OUTCOME_INCORRECT,
    )


def _cheats(problems: Sequence[Problem], asker: Asker) -> Row:
    """Programs in which every function, including the tests' helpers, does the same trivial thing."""
    cases = [
        (f"{problem.name}, {name}", item_of(problem, _every_function(problem.source, does)))
        for problem in problems
        for name, does in _CHEATS.items()
    ]
    return asker.compare("cheats: rejected", cases, lambda result: not correct(result))


def _every_function(source: str, does: str) -> str:
    """Return a program with another's functions, each with the body `does`."""
    names = [each.name for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)]
    return f"{_LIAR}{' = '.join(names)} = {does}\n"


def _mutants(problems: Sequence[Problem], asker: Asker) -> Iterator[Row]:
    mutants = sample_mutants([(each.source, each.prefix) for each in problems], MUTANTS)
    programs = [(mutant.source, problems[mutant.index].test, problems[mutant.index].entry_point) for mutant in mutants]
    cases: dict[bool, list[tuple[str, reward_pb2.ScoreItem]]] = {True: [], False: []}
    for mutant, passes in zip(mutants, plain_verdicts(programs, MUTANT_SECONDS), strict=True):
        problem = problems[mutant.index]
        item = item_of(problem, mutant.source, timeout_seconds=MUTANT_SECONDS)
        cases[passes].append((f"{problem.name}, {mutant.change}", item))
    row = asker.compare("mutants that fail in plain Python: rejected", cases[False], lambda result: not correct(result))
    enough = row.total >= min(FEWEST_MUTANTS, len(problems))
    yield replace(row, bar=f"all, of >= {FEWEST_MUTANTS}", passed=row.passed and enough)
    row = asker.compare("mutants that pass in plain Python: accepted", cases[True], correct)
    yield replace(row, bar="-", passed=True)
