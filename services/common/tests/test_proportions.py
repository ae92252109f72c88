"""The interval of an accuracy, against the equation it solves and against draws."""

import random
from fractions import Fraction
from itertools import combinations, product
from math import sqrt
from statistics import NormalDist, fmean, pvariance

import pytest

from quartet_common.proportions import estimates, majority, pass_at_k, proportion

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


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, right in product(range(1, 9), range(9)):
        outcomes = [i < right for i in range(n)]
        for k in range(1, n + 1) if right <= n else ():
            subsets = list(combinations(outcomes, k))
            assert pass_at_k(n, right, k) == float(Fraction(sum(map(any, subsets)), len(subsets)))


def test_pass_at_k_keeps_its_digits_where_the_difference_of_shares_has_none():
    assert pass_at_k(10**6, 1, 1) == 1e-6 and pass_at_k(10**17, 1, 1) == 1e-17
    assert pass_at_k(4096, 0, 4096) == 0.0 and pass_at_k(4096, 4096, 1) == 1.0


@pytest.mark.parametrize(
    ("answers", "value"),
    [
        ([(1, "8"), (0, "9"), (1, "8.0"), (0, "7")], 1),
        ([(0, "1,000"), (0, "$1000$"), (1, "999")], 0),
        ([(1, "x + 1"), (0, "y"), (1, "x+1"), (0, "y")], 0.5),  # a tie: either, with equal chance
        ([(1, "8"), (0, "9"), (0, "7")], pytest.approx(1 / 3)),
        ([(0, ""), (0, ""), (1, "8")], 1),  # what has no answer does not vote
        ([(0, ""), (0, "")], 0),
        ([(1, "1/2"), (0, "2"), (0, "2"), (1, "0.5")], 0),  # not merged: two spellings of which one wins nothing
        ([(0, "nan"), (0, "1e999999"), (1, "NaN"), (0, "1e999999")], 0),
    ],
)
def test_majority_takes_the_most_frequent_answer(answers, value):
    assert majority(answers) == value


def test_estimates_are_means_over_problems_of_the_least_number_of_completions():
    right, wrong = (1.0, "1"), (0.0, "2")
    found = estimates([[right, wrong, wrong], [right, right, right, wrong], [], [wrong, wrong, wrong]])
    assert list(found) == ["avg@3", "pass@1", "pass@2", "pass@3", "maj@3"]
    values = {name: each.value for name, each in found.items()}
    assert values["avg@3"] == values["pass@1"] == pytest.approx((1 / 3 + 3 / 4 + 0) / 3)
    assert values["pass@2"] == pytest.approx((2 / 3 + 1 + 0) / 3) and values["pass@3"] == pytest.approx(2 / 3)
    assert values["maj@3"] == pytest.approx(1 / 3)
    assert list(estimates([[(1.0, "")]])) == ["avg@1", "pass@1"] and estimates([[]]) == {}


@pytest.mark.parametrize("problems", [30, 200])
def test_intervals_of_the_estimates_cover_the_truth(problems):
    draw = random.Random(7)
    # A problem has the share q of right answers, of mean 0.4, and one wrong answer, so that the majority of 5 is right
    # if 3 of 5 are. The truth is a mean over 20,000 draws of q.
    hardness = [draw.betavariate(0.8, 1.2) for _ in range(20_000)]
    truth = {
        "avg@5": 0.4,
        "pass@5": fmean(1 - (1 - q) ** 5 for q in hardness),
        "maj@5": fmean(q**3 * (10 * (1 - q) ** 2 + 5 * q * (1 - q) + q * q) for q in hardness),
    }
    covered = dict.fromkeys(truth, 0)
    for _ in range(400):
        drawn = [[draw.random() < q for _ in range(5)] for q in (draw.betavariate(0.8, 1.2) for _ in range(problems))]
        found = estimates([[(float(one), str(one)) for one in each] for each in drawn])
        for name, value in truth.items():
            covered[name] += found[name].low <= value <= found[name].high
    assert all(0.92 <= count / 400 <= 0.985 for count in covered.values()), covered
