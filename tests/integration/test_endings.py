"""The ways in which a run ends: what `quartet run --attach` prints, its exit status, and what `quartet audit` says
afterwards.

All rows share a Redis, a broker and a reward service, so that the broker has each run afterwards; each row has its own
preloaded rollout and trainer. `deploy/local/tests` covers the launcher's endings.
"""

import contextlib
import json
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from by_hand import ROOT, ByHand
from preloaded import Pythons

from quartet_common.ports import free_ports

pytestmark = pytest.mark.timeout(400)
ENDED = 200  # timeout in seconds, for a busy machine
RUN_FILE = """
[run]
id = "{name}"
folder = "{folder}/run"
group_size = 2
groups_per_step = 2
max_staleness = 1
[run.sampling]
max_new_tokens = 4
[model]
path = "{model}"
[data]
train = "{folder}/train.jsonl"
[data.evaluation]
heldout = "{folder}/heldout.jsonl"
[rollout]
engine = "transformers"
[rollout.scoring]
attempts = 1
[trainer]
tensorboard = false
[trainer.evaluation]
interval = 0
before_training = false
at_end = false
"""


def problems(count: int, **fields: object) -> list[dict]:
    return [{"prompt": f"1+{n}=?", "gt_answer": str(1 + n)} | fields for n in range(count)]


@dataclass(frozen=True)
class Ending:
    """A row. `printed` and `audited` are patterns; `printed` must match the last lines of `quartet run`."""

    name: str
    status: int
    printed: str
    audited: str
    settings: dict[str, object] = field(default_factory=dict)
    data: list[dict] = field(default_factory=lambda: problems(8))
    audit_status: int = 0
    words: tuple[str, ...] = ()
    """A `quartet runs` command that is run after the first step."""
    interrupted: bool = False
    """By Ctrl-C, after the first step."""


STILL_OPEN = {"data.passes": 0, "run.max_steps": 1_000_000, "run.max_queued_prompts": 64}
NO_VERIFIER = [{"name": "nobody_has_it"}]
EARLY_STOP = {
    "trainer.early_stop.metric": "eval/heldout/ans_acc",
    "trainer.early_stop.patience": 1,
    "trainer.evaluation.interval": 1,
}
ALL_RIGHT = "0 lost, 0 twice, 0 stuck"
SOME = rf"\d+ exactly once, {ALL_RIGHT}"
NEVER_MADE = "the broker has no run '.*': it was deleted, or never created"
ENDINGS = [
    Ending(
        "two-passes-of-the-data-with-a-smaller-last-step",
        0,
        "succeeded: the prompts have ended: 3 steps trained",
        rf"10 exactly once, {ALL_RIGHT}$",
        {"data.passes": 2, "run.groups_per_step": 4, "run.partial_batch": "train"},
        problems(5),
    ),
    Ending(
        "early-stop",
        0,
        r"succeeded: the evaluations have stopped getting better: 2 steps trained",
        rf"4 exactly once, {ALL_RIGHT}, \d+ left over",
        EARLY_STOP,
        problems(80),
    ),
    Ending("cancelled", 1, "was cancelled: ended by quartet runs finish", SOME, STILL_OPEN, words=("finish",)),
    Ending(
        "deleted-under-way",
        2,
        r"run '\S+' does not exist",
        NEVER_MADE,
        STILL_OPEN,
        audit_status=1,
        words=("delete", "--force"),
    ),
    Ending("ctrl-c-leaves-the-run", 130, r"step \d+/", SOME, STILL_OPEN, interrupted=True),
    Ending(
        "all-prompts-dead-of-one-reason",
        1,
        r"failed: the first [2-6]\d prompts died of one reason, and no group was made: .*nobody_has_it",
        rf"0 exactly once, {ALL_RIGHT},.* [2-6]\d dead",
        {"run.max_deliveries": 1, "run.max_staleness": 50},
        problems(60, verifiers=NO_VERIFIER),
    ),
    Ending(
        "most-prompts-dead",
        1,
        r"failed: the prompts have ended: 1 steps trained; 4 of 6 prompts are dead, 4 of 4 of one reason: .*nobody",
        rf"2 exactly once, {ALL_RIGHT}, 4 dead",
        {"run.max_deliveries": 1},
        [*problems(2), *problems(4, verifiers=NO_VERIFIER)],
    ),
]


@pytest.fixture(scope="module")
def shared(pythons: Pythons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    """Redis, broker and reward service for all rows."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "run.toml").touch()
    settings = {"run.folder": folder / "run", "server.metrics": "false"}
    with contextlib.closing(ByHand(folder, folder / "run.toml", pythons, settings)) as made:
        made.start_redis()
        for name in ("broker", "reward"):
            made.start(name)
            made.wait_for(name, "serving at")
        yield made


@pytest.fixture
def run(ending: Ending, shared: ByHand, pythons: Pythons, model: Path, tmp_path: Path) -> Iterator[ByHand]:
    """A row's rollout, trainer and clients."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ending.data))
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in problems(2)))
    (tmp_path / "run.toml").write_text(RUN_FILE.format(name=ending.name, folder=tmp_path, model=model))
    made = ByHand(tmp_path, tmp_path / "run.toml", pythons, ending.settings, shared.addresses | own_addresses())
    with contextlib.closing(made):
        yield made


def own_addresses() -> dict[str, str]:
    return {kind: f"127.0.0.1:{port}" for kind, port in zip(("rollout", "trainer"), free_ports(2), strict=True)}


@pytest.fixture
def ask(run: ByHand, shared: ByHand) -> Callable[..., subprocess.CompletedProcess]:
    """Run a `quartet` command."""

    def ask(*words: str) -> subprocess.CompletedProcess:
        command = [run.pythons["client"], "-m", "quartet_client", *words, "--broker", shared.addresses["broker"]]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    return ask


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
def test_a_run_that_ends(ending: Ending, run: ByHand, ask: Callable[..., subprocess.CompletedProcess]):
    attach = ("run", *run.arguments, "--attach", "--plain", "--wait", "1")
    for name in ("rollout", "trainer"):
        run.start(name)
    client = run.client(*attach)
    if ending.words or ending.interrupted:
        run.wait_for("client", "\nstep 1/")
    if ending.words:
        done = ask("runs", ending.words[0], ending.name, *ending.words[1:])
        assert done.returncode == 0, done.stderr
    if ending.interrupted:
        client.send_signal(signal.SIGINT)
    assert client.wait(ENDED) == ending.status, run.logs()
    printed = client.said()
    assert re.search(ending.printed, "\n".join(printed.splitlines()[-8:])), run.logs()
    assert "Traceback" not in printed
    if ending.status == 1:  # a later client gets the same result
        later = run.client(*attach)
        assert later.wait(ENDED) == 1 and re.search(ending.printed, later.said()), run.logs()
    if ending.status in (0, 1):  # the run has ended, and so has its trainer
        assert run.processes["trainer"].wait(ENDED) == 0, run.logs()
    for name in ("rollout", "trainer"):
        if run.processes[name].poll() is None:
            run.stop(name)
    audit = ask("audit", ending.name, "--config", *run.arguments)
    assert audit.returncode == ending.audit_status, audit.stdout + audit.stderr + run.logs()
    assert re.search(ending.audited, (audit.stdout + audit.stderr).strip()), audit.stdout + audit.stderr
