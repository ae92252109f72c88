"""Engines' processes that are forked from the rollout: they get their work and variables, and no end of the rollout
leaves them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import PATIENCE
from models import write_model
from preloaded import process_of

from quartet_common.ports import free_ports

pytestmark = pytest.mark.timeout(3 * PATIENCE)
RUN_FILE = """
[model]
path = {model}
[addresses]
rollout = {address}
[server]
metrics = false
[rollout]
standalone = true
engine = "{engine}"
[rollout.{engine}]
{options}
"""
GONE = 60.0
"""Seconds after its rollout in which a fork must end."""
OPTIONS = {
    "vllm": "kv_cache_gib = 0.0625\nmax_num_seqs = 8\nmax_num_batched_tokens = 2048",
    "transformers": "max_num_seqs = 8",
}


@pytest.fixture
def start(forked: Any, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts Python with arguments; what is left of it is killed."""
    started: list[subprocess.Popen] = []

    def begin(*arguments: Any) -> subprocess.Popen:
        with forked(), (tmp_path / "log").open("a") as log:
            command = [sys.executable, *map(str, arguments)]
            # As in `engine_owner`: it leads a group, and no session.
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, process_group=0)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def until(what: Callable[[], Any], process: subprocess.Popen) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := what()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("what", ["wait", "work"])
def test_the_fork_does_the_first_core_s_work_with_later_variables_and_ends_with_its_owner(
    what: str, start: Any, tmp_path: Path
) -> None:
    owner = start(Path(__file__).with_name("forked_core.py"), tmp_path, what)
    said = json.loads(owner.stdout.readline())
    (pid,) = said["forks"]
    fork = psutil.Process(pid)
    if what == "work":
        assert said["first"] == pid
        seen = json.loads(until((tmp_path / "seen").exists, owner) and (tmp_path / "seen").read_text())
        assert seen["variables"]["SET_SINCE"] == "the fork" and seen["variables"]["VLLM_NO_USAGE_STATS"] == "1"
        assert seen["pid"] == seen["group"] == pid, "a terminal's Ctrl-C reaches only the rollout"
        assert seen["imported"] and seen["name"] == "EngineCore"
    psutil.Process(process_of(owner.pid)).kill()
    fork.wait(GONE)


@pytest.mark.parametrize("engine", OPTIONS)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_no_signal_to_a_rollout_leaves_its_fork(
    engine: str, number: signal.Signals, status: int, start: Any, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    values = {"model": write_model(tmp_path / "model", tied=True, seed=0), "address": f"127.0.0.1:{port}"}
    quoted = {name: json.dumps(str(value)) for name, value in values.items()}
    file, log = tmp_path / "run.toml", tmp_path / "log"
    file.write_text(RUN_FILE.format(**quoted, engine=engine, options=OPTIONS[engine]))
    rollout = start("-m", "quartet_rollout", file, "--log-format", "json")
    until(lambda: "engine loaded" in log.read_text(), rollout)
    assert "not forked" not in log.read_text()
    process = psutil.Process(process_of(rollout.pid))
    forks = process.children(recursive=True)
    assert forks and all(os.getpgid(fork.pid) != os.getpgid(process.pid) for fork in forks)
    rollout.send_signal(number) if number != signal.SIGKILL else process.kill()
    assert rollout.wait(PATIENCE) == status
    _, alive = psutil.wait_procs(forks, timeout=GONE)
    assert not alive
