"""Real Redis, vLLM and ColossalAI, started individually in any order; a run's files; a program that uses the client."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from by_hand import PACED, ROOT, SERVICES

from quartet_client import Client

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("order", "ordinary"),
    [
        pytest.param(("trainer", "rollout", "reward", "broker"), True, id="trainer-first-with-vLLM-nothing-preloaded"),
        pytest.param(("reward", "rollout", "broker", "trainer"), False, id="reward-first"),
    ],
)
def test_services_started_in_any_order_do_a_run(by_hand, pythons, order, ordinary, tmp_path):
    services = by_hand(ordinary)
    services.start_redis()
    for name in order:
        services.start(name)
    assert services.client("run", "--attach", "--plain", *services.arguments).wait(200) == 0, services.logs()
    assert services.processes["trainer"].wait(120) == 0, services.logs()

    with Client(services.addresses["broker"]) as quartet:
        run = quartet.get_run("by-hand")
    # Six steps of four groups, each committed once; none was lost, rejected or dead.
    assert run.stats.committed == 24
    assert run.stats.duplicates == run.stats.dead == run.stats.stale == run.stats.redelivered == 0

    folder = tmp_path / "run"
    steps = services.rows("step")
    assert [row["step"] for row in steps] == list(range(6))
    assert all(0 <= row["staleness/max"] <= 1 for row in steps)
    # The trainer's log-probs of fresh tokens equal the engine's: both have the same weights and tokens.
    assert steps[0]["mismatch/log_prob_diff_max"] < 1e-3
    assert [row["policy_version"] for row in services.rows("evaluation")] == [0, 3, 6]
    assert len((folder / "evaluations" / "heldout-step-6.jsonl").read_text().splitlines()) == 30
    assert (folder / "samples" / "step-000000.md").is_file() and list((folder / "tensorboard").iterdir())
    loads = (
        "import sys; from transformers import AutoModelForCausalLM as Model, AutoTokenizer as Tokenizer;"
        "Model.from_pretrained(sys.argv[1]); Tokenizer.from_pretrained(sys.argv[1])"
    )
    for environment in ("trainer", "rollout"):
        subprocess.run([pythons[environment], "-c", loads, folder / "model"], check=True, timeout=120)

    for name in ("rollout", "reward", "broker"):
        assert services.stop(name) == 0, services.log(name)


def example(page: str, says: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(block for block in blocks if says in block)


@pytest.fixture
def stranger(tmp_path) -> Path:
    """The interpreter of an environment with the client, installed by `pip install ./client`."""
    uv, python = ROOT / ".quartet" / "tools" / "bin" / "uv", tmp_path / "own" / "bin" / "python"
    subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, tmp_path / "own"], check=True, timeout=60)
    command = [uv, "pip", "install", "--quiet", "--python", python, ROOT / "client"]
    subprocess.run(command, check=True, timeout=100)
    return python


def test_the_readmes_ten_lines_and_evaluations_get_answers_from_a_run_under_way(by_hand, stranger):
    services = by_hand(run__max_steps=100000, data__passes=0, trainer__evaluation__interval=0, trainer__callbacks=PACED)
    services.start_redis()
    for name in SERVICES:
        services.start(name)
    services.client("run", "--attach", "--plain", *services.arguments)
    services.wait_for("client", "step 2/")
    quartet = stranger.with_name("quartet")
    subprocess.run([quartet, "--help"], check=True, timeout=60)  # every command loads
    wrong = subprocess.run([quartet, "status", "--set", "run.beta=1"], capture_output=True, text=True, timeout=60)
    assert "TRL's beta is trainer.kl_coefficient here" in wrong.stderr  # and the table of names is there
    ten_lines = example("README.md", "quartet.submit")
    assert len(ten_lines.strip().splitlines()) <= 10
    printed = []
    for program in (ten_lines, example("docs/client.md", "asyncio.run")):
        here = program.replace("127.0.0.1:7101", services.addresses["broker"])
        done = subprocess.run([stranger, "-c", here], capture_output=True, text=True, timeout=100, cwd="/")
        assert done.returncode == 0, done.stderr + services.logs()
        printed.append(done.stdout)
    # Three prompts of four completions, each with reward and version. (An untrained model generates any text.)
    assert len(re.findall(r" [\d.]+ \d+$", printed[0], re.MULTILINE)) == 12, printed[0]
    assert printed[1]
    with Client(**services.addresses) as quartet:
        before = quartet.get_run("by-hand").policy_version
        live = quartet.evaluate("by-hand", "heldout", timeout=120)
        assert live.complete and live.finished == live.prompts and live.oldest_version <= live.policy_version
        held = quartet.evaluate("by-hand", "heldout", hold=True, timeout=120)
        assert held.complete and held.finished == held.prompts
        # Only this call waits until the rollouts have the newest weights.
        assert max(before, live.policy_version) <= held.oldest_version == held.policy_version
    services.wait_for("client", f"step {held.policy_version + 2}/")
    assert services.stop("client", signal.SIGINT) == 130
    assert "Traceback" not in services.log("client")
