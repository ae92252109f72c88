"""The short learning test: docs/start.md's forty steps lift held-out accuracy; with shuffled answers forty do not.

The control answers what a rising curve alone cannot: that it is the reward that teaches, not, say, sharper sampling.
"""

import json
import resource
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import curve_runs
import first_hour
import pytest
from curve_cases import CASES

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session", autouse=True)
def pythons() -> Iterator[curve_runs.Pythons]:
    """With them are made, once, the demo's warmed-up model and data."""
    with closing(curve_runs.Pythons()) as made:
        curve_runs.prepare(made)
        yield made


def lift(folder: Path) -> float:
    """What a run gained in accuracy on the held-out problems."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row["eval/heldout/ans_acc"] for row in rows if row["kind"] == "evaluation"]
    return accuracies[-1] - accuracies[0]


def test_a_researchers_first_hour_ends_with_a_curve_that_rises(tmp_path):
    """Two files and the page's commands, in a folder that looks like a checkout whose environments are made."""
    for name in (".quartet", "LICENSE", "deploy", "examples"):
        (tmp_path / name).symlink_to(first_hour.ROOT / name)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = first_hour.follow(tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    computed = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{first_hour.PAGE.name} took {seconds:.0f} s, {computed:.0f} s of processor time")
    # Beside other suites it waits for the processors, of which it would have two to itself.
    assert len(first_hour.own_files()) == 2 and computed <= first_hour.MOST_SECONDS
    assert lift(tmp_path / "runs" / "mine") > 0.25
    assert (tmp_path / "runs" / "mine" / "learning_curve.png").is_file()


def test_shuffled_rewards_do_not_teach(pythons, tmp_path):
    (control,) = (case for case in CASES if case.shuffled)
    result = curve_runs.do(tmp_path, pythons, control, seed=1)
    assert result.steps == 40 and control.holds(result.lift), result
