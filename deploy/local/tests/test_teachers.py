"""Runs with teachers: the launcher serves them, and one that is killed costs no group."""

import json
import os
import signal

import pytest

pytestmark = pytest.mark.timeout(400)
STEPS = 6
GROUPS_PER_STEP = 2  # of the run file in conftest.py


def process_of_teacher(launched) -> int:
    """The process id of the teacher itself, not of its guard."""
    found = [
        pid
        for pid, command in launched.processes().items()
        if "rollout.standalone=true" in command and "guard.py" not in command
    ]
    assert len(found) == 1, launched.processes()
    return found[0]


def test_teacher_is_served_restarted_and_stopped_with_the_run(launch, run_file, model, tmp_path):
    settings = [f'run.teachers.big={{model="{model}"}}', "trainer.distillation.coefficient=1", f"run.max_steps={STEPS}"]
    launched = launch(run_file, *(word for setting in settings for word in ("--set", setting)))
    launched.wait_for_line("step 1/", 300)
    os.kill(process_of_teacher(launched), signal.SIGKILL)
    assert launched.wait(300) == 0, launched.said()
    launched.assert_gone(within=2.0)
    assert "teacher-big was killed by SIGKILL" in launched.said()
    groups = STEPS * GROUPS_PER_STEP
    assert f"{groups} exactly once, 0 lost, 0 twice, 0 stuck" in launched.said(), launched.said()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    distances = [row["train/teacher_kl"] for row in rows if row["kind"] == "step"]
    assert len(distances) == STEPS and abs(distances[0]) < 1e-4, "the teacher is the policy that the run starts from"
