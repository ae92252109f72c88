"""The ways in which a run ends: what `quartet run` prints, its exit status, and what `quartet audit` says afterwards.

The table is in `endings.py`. Most rows run with `--attach` on services that all rows share; a rollout and a trainer of
its own begin preloaded. Rows with `launched` drive the whole launcher. All runs are on one Redis,
so that the shared broker can be asked about each of them afterwards.
"""

import contextlib
import json
import re
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from by_hand import ROOT, SERVICES, free_ports
from endings import ENDINGS, Ending, Launched, Scene, Services, preloaded_checkout, problems
from preloaded import Pythons

pytestmark = pytest.mark.timeout(400)
ENDED = 200  # seconds on a busy machine

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
[rollout.transformers]
place = "thread"
[rollout.scoring]
attempts = 1
[trainer]
tensorboard = false
[trainer.evaluation]
interval = 0
before_training = false
at_end = false
"""


@pytest.fixture(scope="module")
def services(pythons: Pythons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    with contextlib.ExitStack() as stack:
        yield Services(tmp_path_factory.mktemp("services"), stack, pythons)


@pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.name)
def test_a_run_that_ends(ending: Ending, services: Services, model: Path, tmp_path: Path):
    scene = Scene(services, model, tmp_path, ending.name)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in ending.data))
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(line) + "\n" for line in problems(2)))
    (tmp_path / "run.toml").write_text(RUN_FILE.format(name=ending.name, folder=tmp_path, model=model))
    scene.settings = _addresses(services, ending.launched) | ending.settings
    with contextlib.ExitStack() as stack:
        arranged = ending.arrange and ending.arrange(scene)
        if isinstance(arranged, Iterator):
            stack.enter_context(contextlib.contextmanager(lambda: arranged)())
        pair = None
        if ending.served and not ending.launched:
            arguments = [str(tmp_path / "run.toml"), *scene.arguments()]
            pair = stack.enter_context(services.run(arguments, tmp_path))
        _start(scene, ending, stack)
        if ending.act:
            ending.act(scene)
        assert scene.process.wait(ENDED) == ending.status, _logs(tmp_path)
        assert re.search(ending.printed, "\n".join(scene.output().splitlines()[-8:])), scene.output()
        assert "Traceback" not in scene.output()
        if pair and ending.status in (0, 1):  # the run has ended, and with it its trainer
            deadline = time.monotonic() + ENDED
            while "trainer" not in pair.statuses:
                assert pair.changed.wait(max(0, deadline - time.monotonic())), _logs(tmp_path)
            assert pair.statuses["trainer"] == 0, _logs(tmp_path)
    words = ["audit", ending.name, "--config", str(tmp_path / "run.toml"), *scene.arguments()]
    audit = scene.quartet(*words, "--broker", scene.broker)
    assert audit.returncode == ending.audit_status, audit.stdout + audit.stderr + _logs(tmp_path)
    assert re.search(ending.audited, (audit.stdout + audit.stderr).strip()), audit.stdout + audit.stderr


def _addresses(services: Services, launched: bool) -> dict[str, object]:
    if not launched:
        return dict(setting.split("=", 1) for setting in services.addresses())
    ports = free_ports(4)
    own = {f"addresses.{kind}": f"127.0.0.1:{port}" for kind, port in zip(SERVICES, ports, strict=True)}
    return own | {"broker.redis_url": services.redis_url}


def _start(scene: Scene, ending: Ending, stack: contextlib.ExitStack) -> None:
    words = [str(scene.folder / "run.toml"), *scene.arguments()]
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ending.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ending.file_bytes, limit[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limit)
    if ending.launched:
        checkout = preloaded_checkout(scene.folder / "checkout", scene.services.pythons)
        scene.client = Launched(words, scene.folder / "client.log", checkout=checkout)
        stack.callback(scene.client.kill_all)
    else:
        command = [*scene.command, "run", *words, "--attach", "--plain", "--wait", "1"]
        with (scene.folder / "client.log").open("w") as log:
            scene.client = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        stack.callback(lambda: (scene.process.kill(), scene.process.wait()))


def _logs(folder: Path) -> str:
    logs = [*folder.glob("*.log"), *folder.glob("run/logs/*.log")]
    return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2500:]}" for log in logs)
