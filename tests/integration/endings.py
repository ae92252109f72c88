"""The table of endings: each row a run, what happens to it, and what is printed and audited afterwards."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from by_hand import ROOT, free_ports

sys.path += [str(ROOT / "tests" / "learning"), str(ROOT / "deploy" / "local" / "tests")]

from curve_services import Services  # noqa: E402
from launched import Launched, preloaded_checkout  # noqa: E402, F401

from quartet_client import Client  # noqa: E402

BEGUN = 150  # seconds until the first step on a busy machine
STILL_OPEN = {"data.passes": 0, "run.max_steps": 1_000_000}
NO_VERIFIER = [{"name": "nobody_has_it"}]


def problems(count: int, **fields: object) -> list[dict]:
    return [{"prompt": f"1+{n}=?", "gt_answer": str(1 + n)} | fields for n in range(count)]


class Scene:
    """A run file, the services that it runs on, and what a row may do to them."""

    def __init__(self, services: Services, model: Path, folder: Path, name: str):
        self.services, self.model, self.folder, self.name = services, model, folder, name
        self.command = [str(services.pythons["client"]), "-m", "quartet_client"]
        self.broker = services.address("broker")
        self.client: subprocess.Popen | Launched | None = None
        self.settings: dict[str, object] = {}

    def arguments(self) -> list[str]:
        return [word for key, value in self.settings.items() for word in ("--set", f"{key}={_toml(value)}")]

    def quartet(self, *words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*self.command, *words], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )

    def output(self) -> str:
        return (self.folder / "client.log").read_text()

    def wait_for(self, text: str) -> None:
        """Wait until the client has printed a line that begins so."""
        deadline = time.monotonic() + BEGUN
        while not re.search(f"^{text}", self.output(), re.MULTILINE):
            assert time.monotonic() < deadline, f"not printed: {text}\n{self.output()}"
            assert self.process.poll() is None, f"it ended before: {text}\n{self.output()}"
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)

    @property
    def process(self) -> subprocess.Popen:
        return self.client.process if isinstance(self.client, Launched) else self.client

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


def _toml(value: object) -> str:
    return json.dumps(value) if isinstance(value, bool | int | float | list) else str(value)


# What happens to a run that has begun ------------------------------------------------------------------------------


def finish(*options: str) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.wait_for("step 1/")
        done = scene.quartet("runs", "finish", scene.name, *options, "--broker", scene.broker)
        assert done.returncode == 0, done.stderr

    return act


def delete(scene: Scene) -> None:
    scene.wait_for("step 1/")
    assert scene.quartet("runs", "delete", scene.name, "--force", "--broker", scene.broker).returncode == 0


def signalled(number: int) -> Callable[[Scene], None]:
    def act(scene: Scene) -> None:
        scene.wait_for("step 1/")
        scene.signal(number)

    return act


# What is so before it begins ---------------------------------------------------------------------------------------


def ended_before(state: str) -> Callable[[Scene], None]:
    """The run of this file was made, and has ended in this state."""

    def arrange(scene: Scene) -> None:
        command = [*scene.command, "run", str(scene.folder / "run.toml"), "--attach", "--plain", *scene.arguments()]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as first:
            with Client(scene.broker) as quartet:
                deadline = time.monotonic() + 60
                while scene.name not in [run.run_id for run in quartet.runs()]:
                    assert time.monotonic() < deadline and first.poll() is None
                    time.sleep(0.05)
                quartet.finish_run(scene.name, state, "it was enough")
            first.wait(60)

    return arrange


def no_chat_template(scene: Scene) -> None:
    bare = scene.folder / "base-model"
    bare.mkdir()
    for file in scene.model.iterdir():
        if file.name not in ("tokenizer_config.json", "chat_template.jinja"):
            (bare / file.name).write_bytes(file.read_bytes())
    told = json.loads((scene.model / "tokenizer_config.json").read_text())
    told.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(told))
    scene.settings["model.path"] = bare


def no_broker(scene: Scene) -> None:
    scene.settings["addresses.broker"] = f"127.0.0.1:{free_ports(1)[0]}"


# The table ---------------------------------------------------------------------------------------------------------

ALL_RIGHT = "0 lost, 0 twice, 0 stuck"


@dataclass(frozen=True)
class Ending:
    """A row. `printed` and `audited` are patterns; `printed` is looked for in the last lines of `quartet run`."""

    name: str
    status: int
    printed: str
    audit_status: int
    audited: str
    settings: dict[str, object] = field(default_factory=dict)
    data: list[dict] = field(default_factory=lambda: problems(8))
    arrange: Callable[[Scene], object] | None = None
    act: Callable[[Scene], None] | None = None
    served: bool = True
    """A rollout and a trainer are there."""
    launched: bool = False
    """The launcher starts its own services."""
    file_bytes: int = 0
    """No process can write a larger file; 0: as large as it likes."""


EARLY_STOP = {
    "trainer.early_stop.metric": "eval/heldout/ans_acc",
    "trainer.early_stop.patience": 1,
    "trainer.evaluation.interval": 1,
}
NEVER_MADE = "the broker does not know run '.*': it was deleted, or never made"
ENDINGS = [
    Ending(
        "max_steps",
        0,
        r"run \S+ is succeeded: all steps are done: 2 steps trained",
        0,
        rf"4 exactly once, {ALL_RIGHT}, \d+ left over",
        {"run.max_steps": 2, "data.passes": 50},
    ),
    Ending(
        "data-ended", 0, r"is succeeded: the prompts have ended: 4 steps trained", 0, rf"8 exactly once, {ALL_RIGHT}$"
    ),
    Ending(
        "data-ended-and-some-did-not-fill-a-step",
        0,
        r"is succeeded: the prompts have ended: 2 steps trained",
        0,
        rf"4 exactly once, {ALL_RIGHT}, 1 dropped",
        data=problems(5),
    ),
    Ending(
        "data-ended-with-a-smaller-last-step",
        0,
        r"is succeeded: the prompts have ended: 3 steps trained",
        0,
        rf"5 exactly once, {ALL_RIGHT}$",
        {"run.partial_batch": "train"},
        problems(5),
    ),
    Ending(
        "two-passes",
        0,
        r"is succeeded: the prompts have ended: 4 steps trained",
        0,
        rf"8 exactly once, {ALL_RIGHT}$",
        {"data.passes": 2},
        problems(4),
    ),
    Ending(
        "early-stop",
        0,
        r"is succeeded: the evaluations have stopped getting better: 2 steps trained",
        0,
        rf"4 exactly once, {ALL_RIGHT}, \d+ left over",
        EARLY_STOP,
        problems(80),
    ),
    Ending(
        "cancelled",
        1,
        r"is cancelled: ended by quartet runs finish",
        0,
        rf"\d+ exactly once, {ALL_RIGHT}",
        STILL_OPEN,
        act=finish(),
    ),
    Ending(
        "called-done-by-a-person",
        0,
        r"is succeeded: good enough",
        0,
        rf"\d+ exactly once, {ALL_RIGHT}",
        STILL_OPEN,
        act=finish("--state", "succeeded", "--reason", "good enough"),
    ),
    Ending(
        "called-failed-by-a-person",
        1,
        r"is failed: useless",
        0,
        rf"\d+ exactly once, {ALL_RIGHT}",
        STILL_OPEN,
        act=finish("--state", "failed", "--reason", "useless"),
    ),
    Ending("deleted-under-way", 2, r"run '\S+' does not exist", 1, NEVER_MADE, STILL_OPEN, act=delete),
    Ending(
        "ctrl-c-leaves-the-run",
        130,
        r"step \d+/",
        0,
        rf"\d+ exactly once, {ALL_RIGHT}",
        STILL_OPEN,
        act=signalled(signal.SIGINT),
    ),
    Ending(
        "all-prompts-dead-of-one-reason",
        1,
        r"is failed: the first [2-6]\d prompts died of one reason, and no group was made: .*nobody_has_it",
        0,
        rf"0 exactly once, {ALL_RIGHT},.* [2-6]\d dead",
        {"run.max_deliveries": 1, "run.max_staleness": 50},
        problems(60, verifiers=NO_VERIFIER),
    ),
    Ending(
        "most-prompts-dead",
        1,
        r"is failed: the prompts have ended: 1 steps trained; 4 of 6 prompts are dead, 4 of 4 of one reason: .*nobody",
        0,
        rf"2 exactly once, {ALL_RIGHT}, 4 dead",
        {"run.max_deliveries": 1},
        [*problems(2), *problems(4, verifiers=NO_VERIFIER)],
    ),
    Ending(
        "no-step",
        1,
        r"is failed: the prompts have ended: 0 steps trained; 1 prompts came to an end, and a step takes 2 groups",
        0,
        rf"0 exactly once, {ALL_RIGHT}, 1 dropped",
        data=problems(1),
    ),
    Ending(
        "a-run-that-had-succeeded",
        0,
        r"is succeeded: it was enough",
        0,
        rf"0 exactly once, {ALL_RIGHT}",
        arrange=ended_before("succeeded"),
        served=False,
    ),
    Ending(
        "a-run-that-had-failed",
        1,
        r"is failed: it was enough",
        0,
        rf"0 exactly once, {ALL_RIGHT}",
        arrange=ended_before("failed"),
        served=False,
    ),
    Ending("no-broker", 2, r"broker at \S+: nothing listens there", 1, NEVER_MADE, arrange=no_broker, served=False),
    Ending(
        "a-misspelt-key",
        2,
        r"unknown key run.max_step\b",
        2,
        r"unknown key run.max_step\b",
        {"run.max_step": 2},
        served=False,
    ),
    Ending(
        "no-evaluation-file",
        2,
        r"cannot read 'gone.jsonl'",
        1,
        NEVER_MADE,
        {"data.evaluation.heldout": "gone.jsonl"},
        served=False,
    ),
    Ending(
        "chats-without-a-template",
        2,
        r'prompt \'line-1\' has "messages", and the model in \'\S+\' has no chat template',
        1,
        NEVER_MADE,
        data=[{"messages": {"role": "user", "content": "1+1=?"}, "gt_answer": "2"}],
        arrange=no_chat_template,
        served=False,
    ),
    Ending(
        "a-checkpoint-that-cannot-be-written",
        1,
        r"quartet: trainer ended with status 1 after 0 restarts: could not write the checkpoint",
        0,
        rf"0 exactly once, {ALL_RIGHT}",
        STILL_OPEN | {"trainer.checkpoint.interval": 1, "launcher.max_restarts": 0},
        launched=True,
        file_bytes=600_000,
    ),
]
