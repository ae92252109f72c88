"""`quartet eval --checkpoint` starts its own services, with or without a run beside it, and leaves nothing behind."""

import json
import signal
from pathlib import Path

import pytest
from test_runs import ENDED, READY, steps_of

from quartet_common.checkpoints import read_manifest

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def held(tmp_path: Path) -> Path:
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"2+{n}=?", "gt_answer": str(2 + n)}) + "\n" for n in range(4)))
    return path


def left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("quartet-eval-*"))


def test_a_checkpoint_is_evaluated_beside_its_run_which_goes_on(launch, run_file, held, tmp_path):
    kept = ("--set", "trainer.checkpoint.interval=2", "--set", "trainer.checkpoint.keep_last=100000")
    running = launch(run_file, "--set", "run.max_steps=1000000", *kept)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002"
    running.wait_until(lambda: read_manifest(checkpoint) is not None, "the first checkpoint", READY)
    known = ("--set", f"data.evaluation.held={held}")
    evaluated = launch(run_file, "held", "--checkpoint", checkpoint, *known, command=("eval",))
    assert evaluated.wait(240) == 0, evaluated.said()
    assert evaluated.said().splitlines()[-1].startswith("held at version 2: accuracy ")
    assert evaluated.said().rstrip().endswith(" over 4 prompts")
    assert not left(tmp_path)
    steps = steps_of(running)
    running.wait_until(lambda: steps_of(running) > steps, "another step", READY)
    assert "starting it again" not in running.said()
    running.send_signal(signal.SIGINT)
    assert running.wait(ENDED) == 130


def test_an_incomplete_evaluation_has_no_figure_and_leaves_its_logs(launch, run_file, held, model, tmp_path):
    with held.open("a") as lines:
        lines.write(json.dumps({"prompt": "1+" * 2000 + "1=?", "gt_answer": "2001"}) + "\n")  # longer than the context
    elsewhere = ("--set", "model.path=/no/such/model")  # the checkpoint's is evaluated
    evaluated = launch(run_file, "mine", "--prompts", held, "--checkpoint", model, *elsewhere, command=("eval",))
    assert evaluated.wait(240) == 1, evaluated.said()
    (folder,) = left(tmp_path)
    told = ["mine at version 0: incomplete: 4 of 5", f"the services' logs are in {folder}/logs"]
    assert evaluated.said().splitlines()[-2:] == told and (folder / "logs" / "rollout.log").exists()
    assert "mine/4@0 has no answer: prompt cannot be used: prompt.input: got 4003 tokens" in evaluated.said()
    evaluated.assert_gone(within=1.0)


def test_an_evaluation_that_is_refused_leaves_no_folder(launch, run_file, held, model, tmp_path):
    typo = ("--set", "reward.worker=2")
    evaluated = launch(run_file, "mine", "--prompts", held, "--checkpoint", model, *typo, command=("eval",))
    assert evaluated.wait(90) == 2 and "unknown key reward.worker" in evaluated.said(), evaluated.said()
    assert not left(tmp_path)


def test_ctrl_c_of_an_evaluation_leaves_nothing(launch, run_file, held, model, tmp_path):
    evaluated = launch(run_file, "mine", "--prompts", held, "--checkpoint", model, command=("eval",))
    evaluated.wait_for_line("reward ready", READY)
    evaluated.send_signal(signal.SIGINT)
    assert evaluated.wait(ENDED) == 130, evaluated.said()
    evaluated.assert_gone(within=1.0)
    assert "Traceback" not in evaluated.said() and not left(tmp_path) and not (tmp_path / "run").exists()
