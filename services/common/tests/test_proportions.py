"""The interval of an accuracy, against the equation it solves and against draws."""

import random
from math import sqrt
from statistics import NormalDist, fmean, pvariance

import pytest

from quartet_common.proportions import proportion

Z = NormalDist().inv_cdf(0.975)
CLUSTERS = [(8, mean) for mean in (0.0, 0.25, 0.5, 1.0, 1.0, 0.875)]


def root(p: float, n: float, outer: float) -> float:
    """The accuracy between p and `outer` (0 or 1) of which p is Z standard errors away, by bisection."""
    inner = p
    for _ in range(60):
        middle = (inner + outer) / 2
        inside = abs(p - middle) < Z * sqrt(middle * (1 - middle) / n)
        inner, outer = (middle, outer) if inside else (inner, middle)
    return inner


@pytest.mark.parametrize(
    ("prompts", "p", "n"),
    [
        ([(1, 1.0)] * 65 + [(1, 0.0)] * 15, 0.8125, 80),
        ([(4, 1.0)] * 65 + [(4, 0.0)] * 15, 0.8125, 80),  # completions that repeat each other say nothing more
        (CLUSTERS, p := fmean(m for _, m in CLUSTERS), p * (1 - p) * 6 / pvariance([m for _, m in CLUSTERS])),
        ([(1, 1.0), (0, 0.0), (3, 0.0)], 0.25, 0.1875 * 16 / (0.75**2 + (3 * 0.25) ** 2)),
    ],
)
def test_it_is_wilsons_by_the_effective_sample_size(prompts, p, n):
    found = proportion(prompts)
    assert found.value == pytest.approx(p) and found.judged == sum(count for count, _ in prompts)
    ends = [end if p == end else root(p, n, end) for end in (0.0, 1.0)]
    assert [found.low, found.high] == pytest.approx(ends, abs=1e-9)


def test_it_covers_the_truth_as_often_as_it_says_where_prompts_differ():
    draw = random.Random(5)
    covered = 0
    for _ in range(1000):
        hardness = [draw.betavariate(1.2, 0.8) for _ in range(60)]  # of mean 0.6
        found = proportion([(8, sum(draw.random() < q for _ in range(8)) / 8) for q in hardness])
        covered += found.low <= 0.6 <= found.high
    assert 0.93 <= covered / 1000 <= 0.97  # by all 480 completions alike: 0.72


def test_there_is_none_where_nothing_was_judged():
    assert proportion([]) is None and proportion([(0, 0.0)]) is None
