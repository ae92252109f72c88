"""The short learning test: docs/start.md's forty steps raise held-out accuracy; with shuffled answers they do not. And
the demo, cut short.

The control shows that the reward causes the rise, and not, for example, sharper sampling.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import curve_runs
import pytest
from curve_cases import CASES

sys.path += [str(curve_runs.ROOT / "tests" / "docs"), str(curve_runs.ROOT / "deploy" / "local" / "tests")]

from launched import preloaded_checkout  # noqa: E402
from pages import blocks  # noqa: E402

pytestmark = pytest.mark.timeout(400)
PAGE = curve_runs.ROOT / "docs" / "start.md"
CLONE = "git clone <this repository> quartet && cd quartet\n"
MOST_SECONDS = 240


@pytest.fixture(scope="session", autouse=True)
def pythons() -> Iterator[curve_runs.Pythons]:
    """The interpreters, after making the demo's warmed-up model and data."""
    with closing(curve_runs.Pythons()) as made:
        curve_runs.prepare(made)
        yield made


def test_a_researchers_first_hour_ends_with_a_curve_that_rises(tmp_path):
    """Write the page's files and run its commands in one shell, in a checkout with environments."""
    for name in (".quartet", "LICENSE", "deploy", "examples"):
        (tmp_path / name).symlink_to(curve_runs.ROOT / name)
    (tmp_path / "mine").mkdir()
    files = [block.text for block in blocks(PAGE) if block.text.startswith("# mine/")]
    assert len(files) == 2
    for text in files:
        (tmp_path / text.partition("\n")[0].removeprefix("# ")).write_text(text)
    clone, *commands = [block.text for block in blocks(PAGE) if block.info == "sh"]
    assert clone == CLONE
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(["bash", "-euo", "pipefail", "-c", "".join(commands)], cwd=tmp_path, check=True, timeout=900)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Other suites use the processors, too.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= MOST_SECONDS
    run = tmp_path / "runs" / "mine"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    accuracies = [row["eval/heldout/ans_acc"] for row in rows if row["kind"] == "evaluation"]
    assert accuracies[-1] - accuracies[0] > 0.25
    assert (run / "learning_curve.png").is_file()


def test_demo_trains_draws_and_states_that_two_steps_teach_little(pythons, tmp_path):
    preloaded_checkout(tmp_path, pythons)
    for name in ("examples", ".quartet/arithmetic"):
        (tmp_path / name).symlink_to(curve_runs.ROOT / name)
    demo = [pythons["client"], tmp_path / "examples/arithmetic/demo.py", "--engine", "transformers", "--steps", "2"]
    own = {**os.environ, "PYTHONPATH": str(tmp_path / "deploy" / "local")}
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(demo, cwd=tmp_path, env=own, timeout=300, **streams)
    assert done.returncode == 1 and "It should have gained 30." in done.stdout, done.stdout + done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    report = json.loads((folder / "demo.json").read_text())
    assert report["steps"] == 2 and report["held_out_problems"] == 651
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_shuffled_rewards_do_not_teach(pythons, tmp_path):
    (control,) = (case for case in CASES if case.shuffled)
    result = curve_runs.do(tmp_path, pythons, control, seed=1)
    assert result.steps == 40 and control.holds(result.lift), result
