"""deploy/slurm/run.sbatch runs its steps, goes on after a preemption, and queues itself again before its time limit.

There is no Slurm here: `srun` and `scontrol` are stand-ins (tests/deploy/slurm). The nodes are two loopback addresses.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from by_hand import ROOT, SERVICES, overriding, write_sums
from preloaded import Pythons
from started import Started

from quartet_client.audit import read_checkpoint

STAND_INS = ROOT / "tests" / "deploy" / "slurm"
SCRIPT = ROOT / "deploy" / "slurm" / "run.sbatch"
STEPS, GROUPS = 6, 4

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def checkout(pythons: Pythons, tmp_path: Path) -> Path:
    """A checkout whose environments have the commands of this one, run by interpreters with the imports done."""
    for kind in (*SERVICES, "client"):
        folder = tmp_path / "checkout" / ".quartet" / "envs" / kind / "bin"
        folder.mkdir(parents=True)
        name = "quartet" if kind == "client" else f"quartet-{kind}"
        for command, runs in ((name, f"-m quartet_{kind}"), ("python", "")):  # the broker's python finds a Redis
            (folder / command).write_text(f'#!/bin/sh\nexec {pythons[kind]} {runs} "$@"\n')
            (folder / command).chmod(0o755)
    return tmp_path / "checkout"


@pytest.fixture
def job(model: Path, checkout: Path, tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Return what starts the job, on two nodes, with more keys of the run file."""
    for name in ("train", "heldout"):
        write_sums(tmp_path / f"{name}.jsonl")
    settings = {
        "run.id": "scheduled",
        "run.group_size": 4,
        "run.groups_per_step": GROUPS,
        "run.max_steps": STEPS,
        "model.path": model,
        "rollout.engine": "transformers",
        "data.train": tmp_path / "train.jsonl",
        "data.evaluation.heldout": tmp_path / "heldout.jsonl",
        "trainer.evaluation.interval": 3,
        "trainer.checkpoint.interval": 2,
    }
    slurm = {
        "PATH": f"{STAND_INS}:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid() % 100),
        "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.2",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "QUARTET": str(checkout),
        "SLURM_TMPDIR": str(tmp_path / "scratch"),
        "QUARTET_FOLDER": str(tmp_path / "run"),
        "REQUEUED": str(tmp_path / "requeued"),
    }
    jobs = []

    def start(**more: object) -> Started:
        keys = overriding({**settings, **{key.replace("__", "."): value for key, value in more.items()}})
        command = [SCRIPT, ROOT / "examples" / "arithmetic" / "run.toml", *keys]
        jobs.append(Started(command, tmp_path / "job.log", cwd=ROOT, env={**os.environ, **slurm}))
        return jobs[-1]

    yield start
    for each in jobs:
        each.close()


def steps(folder: Path) -> list[int]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row["step"] for row in map(json.loads, lines) if row["kind"] == "step"]


def test_job_near_its_time_limit_queues_itself_again_and_goes_on_training_each_group_once(job, tmp_path):
    first = job()
    first.wait_until(lambda: re.search(r"^step 2\b", first.said(), re.MULTILINE) is not None, "a second step")
    os.kill(first.pid, signal.SIGUSR1)
    assert first.wait(120) == 0, first.said()
    assert (tmp_path / "requeued").read_text().split() == [str(os.getpid() % 100)]
    assert not list((tmp_path / "scratch").iterdir()), "nothing is left on a node"
    second = job()
    assert second.wait(200) == 0, second.said()
    assert steps(tmp_path) == list(range(STEPS))
    trained = read_checkpoint(tmp_path / "run" / "checkpoints", "scheduled")
    groups = [group for _, batch in trained.ledger for group in batch]
    assert trained.step == STEPS and len(groups) == len(set(groups)) == STEPS * GROUPS


def test_job_that_is_preempted_while_it_starts_leaves_nothing(job, tmp_path):
    starting = job()
    starting.wait_until((tmp_path / "run" / "logs" / "trainer.log").exists, "its last step began")
    os.kill(starting.pid, signal.SIGTERM)
    assert starting.wait(120) == 143, starting.said()
    assert not list((tmp_path / "scratch").iterdir())
    assert not (tmp_path / "requeued").exists(), "Slurm itself queues a preempted job again"
    with pytest.raises(ProcessLookupError):
        os.killpg(starting.pid, 0)


def test_job_with_a_wrong_configuration_ends_and_its_log_says_why(job, tmp_path):
    wrong = job(reward__workers=-1)
    assert wrong.wait(120) == 2, wrong.said()
    assert "reward.workers" in (tmp_path / "run" / "logs" / "reward.log").read_text()
