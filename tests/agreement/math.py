"""Agreement of the mathematical verifiers. Data, each file optional:

gsm8k/test.jsonl           {"answer": "… #### 42"}, a worked solution
math/math500.jsonl         {"answer": "\\\\frac{1}{2}"}
mathverify/triples.jsonl   cases of Math-Verify's tests: {"test": …, "params": {"gold": …, "pred": …, "expected": 1}}
verdicts/pairs.jsonl       reported verdicts: {"verifier": …, "parameters": {}, "reference": …, "completion": …,
                           "accept": true, "math_verify": false}; the last is what math-verify alone says
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quartet.v1 import reward_pb2

from quartet_reward.math.compare import STRICT
from quartet_reward.math.extract import reference_answer
from quartet_reward.math.worker import judge_reference
from tests.agreement import rows
from tests.agreement.rows import Asker, Row, correct, read, reward_service, said

# Number of other problems' references that are tried as answers for each reference.
SHIFTS = (1, 7, 61, 211)

# Shares of the reported verdicts.
MOST_ACCEPTED, MOST_REJECTED = 0.02, 0.08

# Math-Verify's tests that are configured to extract formulas only.
_FORMULAS_ONLY = {
    "test_latex_notation",
    "test_latex_notation_math",
    "test_relations_math",
    "test_matrix_extraction",
    "test_set_rel_assymetry",
}
# Math-Verify's cases that contradict a guard, with the policy under which they have the expected result.
_CHOSEN: dict[tuple[str, str], dict[str, Any]] = {
    ("$10/9$", "Answer $ \\frac{1}{2} \\$ = \\frac{10}{9} $"): {"chains": "last"},
    ("$x = 11$", "$x = 5+5+1 = 7 =11$"): {"chains": "last"},
    ("$x = 1/3$", "$x = 5+5+1 = 1/3 \\approx 11$"): {"chains": "last"},
    ("$1/3$", "$x=1/3\\approx1.3$"): {"chains": "last"},
    ("$z = 1 + 1 = 2$", "$z = 3+3 = 2$"): {"chains": "last"},
    ("$(1,3)$", "${1,3}$"): {"bare_braces": "group"},
    ("$1$", "$\\frac3{3} $"): {"unevaluated": True},
    ("$10$", "Answer \\( (9+1) \\)"): {"unevaluated": True},
}
# Math-Verify's test expects equality, but they are not equal: it drops \mathrm{e} as if it were a unit.
_UNTRUE = {("$1 - \\frac{1}{\\mathrm{e}}$", "$1 + \\frac{1}{\\mathrm{e}}$")}
# Possible differences between references of equal value: separators, spaces, degrees, the unknown's name.
_NOT_COUNTED = re.compile(r"\\!|\{,\}|,|\s|\^\\circ|^[a-z]\s*=")


def measure(data: Path) -> Iterator[Row]:
    """Return the rows for the files in `data`."""
    solutions = [row["answer"] for row in read(data / "gsm8k/test.jsonl")]
    gsm8k = [solution.rpartition("####")[2].strip() for solution in solutions]
    math500 = [row["answer"] for row in read(data / "math/math500.jsonl")]
    triples = read(data / "mathverify/triples.jsonl")
    pairs = read(data / "verdicts/pairs.jsonl")
    if not (gsm8k or math500 or triples or pairs):
        return
    with reward_service("reward.workers=2", "reward.deadline_seconds=20") as asker:
        for name, golds, references in (("GSM8K", gsm8k, solutions), ("MATH-500", math500, math500)):
            if golds:
                yield _readings(name, references)
                yield from _golds(name, golds, references, asker)
        if triples:
            yield from _triples(triples, asker)
        if pairs:
            yield from _pairs(pairs, asker)


def _readings(name: str, references: list[str]) -> Row:
    """Return the row of the references that are read as mathematics, as each verifier of mathematics reads them."""
    answers = map(reference_answer, references)
    text = [f"{answer[:80]!r} is text" for answer in answers if not judge_reference(answer, STRICT)]
    agreed = len(references) - len(text)
    return Row(f"{name}, references read as mathematics", agreed, len(references), "all", not text, text)


def _golds(name: str, golds: list[str], references: list[str], asker: Asker) -> Iterator[Row]:
    for verifier, form in (
        ("boxed", "so it is \\boxed{{{}}}."),
        ("think_answer_tags", "<think>so</think><answer>{}</answer>"),
        ("math", "Therefore the answer is ${}$."),
    ):
        pairs = zip(golds, references, strict=True)
        cases = [(repr(gold), _item(form.format(gold), reference, verifier)) for gold, reference in pairs]
        least = math.ceil(0.999 * len(golds))
        yield asker.compare(f"{name}, golds against their references, {verifier}", cases, correct, least)
    pairs = [(golds[i], golds[(i + shift) % len(golds)]) for shift in SHIFTS for i in range(len(golds))]
    pairs = sorted({(gold, other) for gold, other in pairs if gold != other})
    results = asker.ask([_item(f"\\boxed{{{other}}}", gold, "math") for gold, other in pairs])
    accepted = [pair for pair, result in zip(pairs, results, strict=True) if correct(result)]
    unread = [pair for pair, result in zip(pairs, results, strict=True) if result.HasField("failure")]
    notes = [f"accepted: gold {gold!r}, answer {other!r}" for gold, other in accepted]
    notes += [f"failed: gold {gold!r}, answer {other!r}" for gold, other in unread]
    false = [pair for pair in accepted if not _same_value(*pair)]
    yield Row(
        f"{name}, another problem's different gold refused",
        len(pairs) - len(accepted) - len(unread),
        len(pairs),
        "0 accepted but for equal values, listed below",
        not false and not unread,
        notes,
    )


def _same_value(gold: str, other: str) -> bool:
    """Return whether differently written references have equal values, judged by their text without the verifiers."""
    plain = [_NOT_COUNTED.sub("", text).replace("\\dfrac", "\\frac") for text in (gold, other)]
    if plain[0] == plain[1]:
        return True
    try:
        return float(plain[0]) == float(plain[1])
    except ValueError:
        return False


def _triples(rows: list[dict], asker: Asker) -> Iterator[Row]:
    cases = [row for row in rows if row["params"]]
    without_pair = [row["test"] for row in rows if not row["params"]]

    items = [_item(_pair(row)[1], _case(row)[0], "math", **_policy(row)) for row in cases]
    verdicts = zip(cases, asker.ask(items), strict=True)
    differing = {_pair(row): said(result) for row, result in verdicts if correct(result) != _case(row)[1]}
    untrue = {_pair(row) for row in cases} & _UNTRUE
    notes = [f"{gold!r}, {pred!r}: not as expected: {words}" for (gold, pred), words in differing.items()]
    if without_pair:
        notes.append(f"{len(without_pair)} rows hold no pair, being tests of functions: {', '.join(without_pair)}")
    agreed = sum(_pair(row) not in differing for row in cases)
    bar = "all as expected but what is untrue, listed below"
    yield Row("Math-Verify's cases", agreed, len(cases), bar, set(differing) == untrue, notes)


def _pairs(rows: list[dict], asker: Asker) -> Iterator[Row]:
    items = [_item(row["completion"], row["reference"], row["verifier"], **row["parameters"]) for row in rows]
    results = list(zip(rows, asker.ask(items), strict=True))
    accepted = [_shown(row, result) for row, result in results if correct(result) and not row["accept"]]
    rejected = [_shown(row, result) for row, result in results if not correct(result) and row["accept"]]
    # A computation is not an answer, whatever math-verify says: docs/math.md.
    ours = [
        _shown(row, result)
        for row, result in results
        if correct(result) != row["accept"] == row["math_verify"]
        and result.score.outcome != reward_pb2.OUTCOME_UNEVALUATED
    ]
    for name, wrong, most in (
        ("not accepted falsely", accepted, MOST_ACCEPTED * len(rows)),
        ("not rejected falsely", rejected, MOST_REJECTED * len(rows)),
        ("not worse than math-verify alone", ours, 0),
    ):
        agreed = len(rows) - len(wrong)
        yield Row(f"Reported verdicts, {name}", agreed, len(rows), f"at most {most:g} wrong", len(wrong) <= most, wrong)


def _shown(row: dict, result: reward_pb2.ScoreResult) -> str:
    return f"reference {row['reference'][-80:]!r}, completion {row['completion'][-80:]!r}: {said(result)}"


def _case(row: dict) -> tuple[str, bool]:
    """Return the reference and whether the prediction must be accepted."""
    parameters = row["params"]
    expected = parameters["expected"] if "expected" in parameters else parameters["result"]
    if isinstance(expected, list):  # multiple choice: the expected choice, or none
        return (expected[-1], True) if expected else ("A", False)
    return parameters["gold"], bool(expected)


def _policy(row: dict) -> dict[str, Any]:
    """Return the parameters of `math` that correspond to the case's configuration."""
    parameters, policy = row["params"], {}
    if row["test"] in _FORMULAS_ONLY:
        policy["prose"] = "formulas"
    if "precision" in parameters:
        policy["decimal_places"] = parameters["precision"]
    if "strict" in parameters:
        policy["any_names"] = not parameters["strict"]
    if "allow_set_relation_comp" in parameters:
        policy["relations_as_sets"] = parameters["allow_set_relation_comp"]
    if "config" in parameters:
        strings = parameters["config"].partition("strings=(")[2].partition(")")[0]
        policy["choices"] = [choice.strip(" '") for choice in strings.split(",") if choice.strip()]
    return policy | _CHOSEN.get(_pair(row), {})


def _pair(row: dict) -> tuple[str, str]:
    return row["params"].get("gold", ""), row["params"]["pred"]


def _item(completion: str, gold: str, verifier: str, **parameters: Any) -> reward_pb2.ScoreItem:
    return rows.item_of(verifier, completion, reward_pb2.Reference(answer=gold), parameters)
