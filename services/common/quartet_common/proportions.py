"""The share of right answers, and its 95% confidence interval."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

_Z = 1.959963984540054  # the 97.5% quantile of the standard normal distribution


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
