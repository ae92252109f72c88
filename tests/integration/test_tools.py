"""A run whose policy calls the Python tool: four real services; the tool's output is not in the loss."""

import json
import subprocess
from pathlib import Path

import pytest
from by_hand import ROOT
from preloaded import Pythons

from quartet_client import Client

pytestmark = pytest.mark.timeout(300)

STEPS, GROUPS, COMPLETIONS = 2, 2, 2
_MAKE_TALKER = "import sys; from pathlib import Path; from talker import write_talker; write_talker(Path(sys.argv[1]))"


@pytest.fixture
def talker(pythons: Pythons, tmp_path: Path) -> Path:
    """A model that was trained to call the tool with 21*2 and to answer with its output."""
    folder = tmp_path / "talker"
    where = ROOT / "services" / "rollout" / "tests" / "service"
    subprocess.run([pythons["rollout"], "-c", _MAKE_TALKER, folder], cwd=where, check=True, timeout=200)
    return folder


def test_conversations_with_a_tool_are_trained_without_what_the_tool_wrote(by_hand, talker, tmp_path):
    services = by_hand(
        model__path=talker,
        run__environment__name="python_tool",
        run__environment__max_turns=3,
        run__verifiers='[{ name = "boxed" }]',
        run__sampling__max_new_tokens=80,
        run__evaluation_sampling__temperature=0,
        run__group_size=COMPLETIONS,
        run__groups_per_step=GROUPS,
        run__max_steps=STEPS,
        trainer__skip_zero_advantage="false",
        trainer__evaluation__interval=0,
    )
    question = json.dumps({"prompt": "21*2=?\n", "gt_answer": "42"})
    (tmp_path / "train.jsonl").write_text(f"{question}\n" * 8)
    (tmp_path / "heldout.jsonl").write_text(f"{question}\n" * 3)
    services.run_all()

    checkpoints = tmp_path / "run" / "checkpoints"
    words = ("audit", "by-hand", "--broker", services.addresses["broker"], "--checkpoints", str(checkpoints))
    assert services.client(*words).wait(60) == 0, services.log("client")
    with Client(services.addresses["broker"]) as quartet:
        stats = quartet.get_run("by-hand").stats
    assert stats.committed == STEPS * GROUPS and stats.duplicates == stats.dead == stats.redelivered == 0

    steps = services.rows("step")
    assert [row["step"] for row in steps] == list(range(STEPS))
    for row in steps:
        assert 0 < row["batch/trained_tokens"] < row["batch/completion_tokens"]
    # The trainer's log-probs of generated tokens equal the rollout's: both have the tool's output at the same place.
    assert steps[0]["mismatch/log_prob_diff_max"] < 1e-3
    first, last = services.rows("evaluation")
    assert first["eval/heldout/ans_acc"] == 1 and last["policy_version"] == STEPS
    line = json.loads((tmp_path / "run" / "evaluations" / "heldout-step-0.jsonl").read_text().splitlines()[0])
    assert "42" in line["prediction"] and "output" in line["prediction"]
