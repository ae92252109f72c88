"""The share of right answers, avg@k, pass@k and maj@k, each with its 95% confidence interval."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import comb, sqrt

_Z = 1.959963984540054  # the 97.5% quantile of the standard normal distribution

SOLVED = 0.5
"""A completion with at least this answer accuracy counts as solved."""


@dataclass(frozen=True, slots=True)
class Proportion:
    """An accuracy over the judged completions of some prompts.

    Attributes:
        value, low, high: the mean and the ends of its 95% interval, 0 to 1.
        judged: completions, at least one.
    """

    value: float
    low: float
    high: float
    judged: int


def proportion(prompts: Sequence[tuple[int, float]]) -> Proportion | None:
    """Return the mean over completions with Wilson's score interval; None if no completion was judged.

    Completions of one prompt are not independent. n in Wilson's formula (JASA 22, 1927) is therefore the effective
    sample size p(1 - p) / SE², SE² the variance of p over prompts (Franco et al., J. Surv. Stat. Methodol. 7, 2019), at
    most the number of completions; if all prompts have the same mean, it is the number of prompts.

    Args:
        prompts: of each, how many completions were judged, and their mean accuracy.
    """
    prompts = [(count, mean) for count, mean in prompts if count]
    judged = sum(count for count, _ in prompts)
    if not judged:
        return None
    p = sum(count * mean for count, mean in prompts) / judged
    squares = sum((count * (mean - p)) ** 2 for count, mean in prompts)
    n = min(p * (1 - p) * judged**2 / squares, judged) if squares else len(prompts)
    middle = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    reach = _Z / (1 + _Z**2 / n) * sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    return Proportion(p, max(middle - reach, 0.0), min(middle + reach, 1.0), judged)


Answer = tuple[float, str]
"""A judged completion: its answer accuracy, 0 to 1, and the answer as the verifier read it; "" does not vote."""


def estimates(problems: Sequence[Sequence[Answer]]) -> dict[str, Proportion]:
    """Return avg@k, maj@k, and pass@j for j = 1, 2, 4, … and k, each the mean over problems with its interval.

    k is the number of judged completions of a problem, of unequal numbers the least. Intervals are those of
    `proportion`: problems are the clusters.

    Args:
        problems: their judged completions, in order; problems without one are left out.
    """
    problems = [problem for problem in problems if problem]
    if not problems:
        return {}
    k = min(map(len, problems))
    values = {f"avg@{k}": [sum(accuracy for accuracy, _ in each) / len(each) for each in problems]}
    solved = [(len(each), sum(accuracy >= SOLVED for accuracy, _ in each)) for each in problems]
    for j in sorted({1 << i for i in range(k.bit_length())} | {k}):
        values[f"pass@{j}"] = [pass_at_k(n, right, j) for n, right in solved]
    if any(answer for each in problems for _, answer in each):
        values[f"maj@{k}"] = [majority(each[:k]) for each in problems]
    found = {name: proportion([(k, value) for value in each]) for name, each in values.items()}
    return {name: one for name, one in found.items() if one is not None}


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k is right) from `right` of n (Chen et al. 2021, HumanEval).

    1 - C(n - right, k) / C(n, k), in whole numbers, rounded once.
    """
    return (comb(n, k) - comb(n - right, k)) / comb(n, k)


def majority(answers: Sequence[Answer]) -> float:
    """Return the accuracy of the most frequent answer of a problem (maj@k; Wang et al. 2022, self-consistency).

    Answers are one if they are the same text without white space and `$`, or the same decimal number. Of a tie it is
    the mean over the tied answers; 0 if no completion has an answer.
    """
    votes: dict[str, list[float]] = {}
    for accuracy, answer in answers:
        if answer:
            votes.setdefault(_spelled(answer), []).append(accuracy)
    most = max(map(len, votes.values()), default=0)
    tied = [sum(each) / most for each in votes.values() if len(each) == most]
    return sum(tied) / len(tied) if tied else 0.0


def _spelled(answer: str) -> str:
    text = re.sub(r"[\s$]+", "", answer)
    try:
        number = Decimal(re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", text))
        return format(number.normalize(), "f") if number.is_finite() and abs(number.adjusted()) < 100 else text
    except InvalidOperation:
        return text
