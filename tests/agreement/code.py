"""Agreement of the verifier `code`. Data, each file optional:

humaneval/HumanEval.jsonl.gz (or .jsonl)   {"task_id", "prompt", "canonical_solution", "test", "entry_point"}
mbpp/mbpp_sanitized_codet.jsonl            the same fields
mbpp/mbpp.jsonl                            {"task_id", "code", "test_setup_code", "test_list"}
contests/code_eval_code_contests.jsonl     {"id", "test": '[{"input": {"stdin": …}, "output": {"stdout": …}}, …]'}

References must pass, programs that cheat must not, nor mutants (a changed operator, constant or bound) that fail in
plain Python.
"""

import ast
import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.struct_pb2 import Struct
from quartet.v1 import reward_pb2

from tests.agreement.mutants import Mutant, plain_verdicts, sample_mutants
from tests.agreement.rows import Asker, Row, reward_service

MUTANTS = 700
FEWEST_MUTANTS = 500
# For a reference's tests: enough on the busiest machine.
REFERENCE_SECONDS = 60.0
# For a mutant's tests, of processor time in plain Python and of wall time in the service: some mutants never end.
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
    """A program that is right, and its assert-style tests."""

    name: str
    source: str
    test: str
    entry_point: str
    prefix: str = ""
    """What a completion continues; it defines helpers of the test."""


def measure(data: Path) -> Iterator[Row]:
    """Measure what `data` holds."""
    humaneval = [
        problem
        for name in ("humaneval/HumanEval.jsonl.gz", "humaneval/HumanEval.jsonl")
        for problem in read_humaneval(data / name)
    ]
    sanitized = read_sanitized_mbpp(data / "mbpp/mbpp_sanitized_codet.jsonl")
    full = read_mbpp(data / "mbpp/mbpp.jsonl")
    contests = data / "contests/code_eval_code_contests.jsonl"
    if not (humaneval or sanitized or full or contests.exists()):
        return
    with reward_service("reward.sandbox.slots=4") as asker:
        if humaneval:
            yield _references("HumanEval", humaneval, len(humaneval), asker)
        if sanitized:
            yield _references("MBPP, sanitized", sanitized, len(sanitized) - _MOST_SANITIZED_MISSED, asker)
        if full:
            yield _references("MBPP", full, int(_SHARE_OF_MBPP * len(full)), asker)
        if contests.exists():
            yield from _contests(_rows(contests), asker)
        if humaneval or sanitized:
            yield _cheats(humaneval + sanitized, asker)
            yield from _mutants(humaneval + sanitized, asker)


def read_humaneval(path: Path) -> list[Problem]:
    """Return the problems of a file in HumanEval's format; none if there is no such file."""
    return [
        Problem(
            row["task_id"], row["prompt"] + row["canonical_solution"], row["test"], row["entry_point"], row["prompt"]
        )
        for row in _rows(path)
    ]


def read_sanitized_mbpp(path: Path) -> list[Problem]:
    """Return the problems of a file in CodeT's format of MBPP; none if there is no such file.

    The body of its solutions is not indented as the docstring of its prompts is: the docstring is left out.
    """
    problems = []
    for row in _rows(path):
        head, _, rest = row["prompt"].partition("\n    '''")
        after = rest.partition("'''")[2]
        source = head + "\n" + after.lstrip("\n") + row["canonical_solution"]
        problems.append(Problem(row["task_id"], source, row["test"], row["entry_point"]))
    return problems


def read_mbpp(path: Path) -> list[Problem]:
    """Return the problems of a file in MBPP's format; none if there is no such file."""
    return [
        Problem(f"MBPP/{row['task_id']}", row["code"], "\n".join([row["test_setup_code"], *row["test_list"]]), "")
        for row in _rows(path)
    ]


def item_of(problem: Problem, source: str | None = None, **parameters: Any) -> reward_pb2.ScoreItem:
    """Return the item of a problem's own program, or of another for the same tests."""
    return reward_pb2.ScoreItem(
        completion=fenced(problem.source if source is None else source),
        reference=reward_pb2.Reference(test_program=problem.test, entry_point=problem.entry_point),
        verifiers=[_code(prefix=problem.prefix, **parameters)],
    )


def fenced(source: str) -> str:
    """Return a completion that gives a program."""
    return f"Here it is:\n```python\n{source}\n```\n"


def _references(name: str, problems: Sequence[Problem], bar: int, asker: Asker) -> Row:
    results = asker.ask([item_of(problem, timeout_seconds=REFERENCE_SECONDS) for problem in problems])
    notes = [
        f"{problem.name}: {_said(result)}"
        for problem, result in zip(problems, results, strict=True)
        if not _passed(result)
    ]
    agreed = len(problems) - len(notes)
    return Row(f"{name}: references pass", agreed, len(problems), f">= {bar}", agreed >= bar, notes)


def _contests(rows: Sequence[dict[str, Any]], asker: Asker) -> Iterator[Row]:
    """These have no solutions: a table of all outputs stands for one, and one with an error for a wrong one."""
    right, wrong, names = [], [], []
    for row in rows:
        pairs = [(case["input"]["stdin"], case["output"]["stdout"]) for case in json.loads(row["test"])]
        spoilt = [*pairs[:-1], (pairs[-1][0], pairs[-1][1].rstrip() + "0")]
        right.append(_contest_item(pairs, dict(pairs)))
        wrong.append(_contest_item(pairs, dict(spoilt)))
        names.append(f"problem {row['id']}")
    for name, items, wanted in (
        ("contests: all outputs right", right, reward_pb2.OUTCOME_CORRECT),
        ("contests: the last output wrong", wrong, reward_pb2.OUTCOME_INCORRECT),
    ):
        results = asker.ask(items)
        notes = [
            f"{problem}: {_said(result)}"
            for problem, result in zip(names, results, strict=True)
            if result.score.outcome != wanted
        ]
        yield Row(name, len(items) - len(notes), len(items), "all", not notes, notes)


def _contest_item(pairs: list[tuple[str, str]], table: dict[str, str]) -> reward_pb2.ScoreItem:
    program = f"import sys\ntable = {table!r}\nsys.stdout.write(table[sys.stdin.read()])"
    cases = [reward_pb2.TestCase(input=given, output=expected) for given, expected in pairs]
    return reward_pb2.ScoreItem(
        completion=fenced(program), reference=reward_pb2.Reference(test_cases=cases), verifiers=[_code()]
    )


def _cheats(problems: Sequence[Problem], asker: Asker) -> Row:
    """Programs whose every function, the tests' helpers included, does one thing."""
    asked = [(problem, name) for problem in problems for name in _CHEATS]
    results = asker.ask([item_of(problem, _every_function(problem.source, _CHEATS[name])) for problem, name in asked])
    accepted = [
        f"{problem.name}, {name}: {_said(result)}"
        for (problem, name), result in zip(asked, results, strict=True)
        if _passed(result)
    ]
    return Row("cheats: rejected", len(asked) - len(accepted), len(asked), "all", not accepted, accepted)


def _every_function(source: str, does: str) -> str:
    """A program that defines the functions of another, each as `does`."""
    names = [each.name for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)]
    return f"{_LIAR}{' = '.join(names)} = {does}\n"


def _mutants(problems: Sequence[Problem], asker: Asker) -> Iterator[Row]:
    mutants: list[Mutant] = sample_mutants([(each.source, each.prefix) for each in problems], MUTANTS)
    programs = [(mutant.source, problems[mutant.index].test, problems[mutant.index].entry_point) for mutant in mutants]
    plain = plain_verdicts(programs, MUTANT_SECONDS)
    results = asker.ask(
        [item_of(problems[mutant.index], mutant.source, timeout_seconds=MUTANT_SECONDS) for mutant in mutants]
    )
    wrong = [index for index, passes in enumerate(plain) if not passes]
    accepted = [_mutant_note(problems, mutants[index], results[index]) for index in wrong if _passed(results[index])]
    yield Row(
        "mutants that fail in plain Python: rejected",
        len(wrong) - len(accepted),
        len(wrong),
        f"all, of >= {FEWEST_MUTANTS}",
        not accepted and len(wrong) >= min(FEWEST_MUTANTS, len(problems)),
        accepted,
    )
    passing = [index for index, passes in enumerate(plain) if passes]
    rejected = [
        _mutant_note(problems, mutants[index], results[index]) for index in passing if not _passed(results[index])
    ]
    yield Row(
        "mutants that pass in plain Python: accepted", len(passing) - len(rejected), len(passing), "-", True, rejected
    )


def _mutant_note(problems: Sequence[Problem], mutant: Mutant, result: reward_pb2.ScoreResult) -> str:
    return f"{problems[mutant.index].name}, {mutant.change}: {_said(result)}"


def _passed(result: reward_pb2.ScoreResult) -> bool:
    return result.WhichOneof("result") == "score" and result.score.outcome == reward_pb2.OUTCOME_CORRECT


def _said(result: reward_pb2.ScoreResult) -> str:
    if result.WhichOneof("result") == "failure":
        return f"{reward_pb2.FailureKind.Name(result.failure.kind)}: {result.failure.message}"
    return f"{reward_pb2.Outcome.Name(result.score.outcome)}: {result.score.reason}"


def _code(**parameters: Any) -> reward_pb2.VerifierSpec:
    struct = Struct()
    struct.update(parameters)
    return reward_pb2.VerifierSpec(name="code", parameters=struct)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if path.suffix == ".gz" else packed).decode()
    return [json.loads(line) for line in text.split("\n") if line.strip()]
