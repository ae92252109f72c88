"""A full disk: the trainer waits for space and trains each step once. Small real disks, filled and emptied."""

import json
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_broker import FakeBroker
from trainer_process import Start, TrainerProcess

from quartet_common.ledger import read_ledger
from quartet_trainer.checkpoints import find_checkpoints

pytestmark = pytest.mark.timeout(300)
INODES = 300


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 MB and `INODES` files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size=8m,nr_inodes={INODES}"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small disk: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path, of: str) -> None:
    """Take all bytes or all files of the disk."""
    filler = disk / "filler"
    filler.mkdir()
    try:
        if of == "bytes":
            (filler / "big").write_bytes(b"x" * (9 << 20))
        for number in range(INODES):
            (filler / str(number)).touch()
    except OSError:
        return
    pytest.fail("the disk is not full")


def empty(disk: Path) -> None:
    for path in (disk / "filler").iterdir():
        path.unlink()
    (disk / "filler").rmdir()


def wait_for_space(process: TrainerProcess, disk: Path) -> None:
    where = f"space on the disk of '{disk / 'checkpoints'}'"
    process.wait_for(lambda: list(process.status().waiting_for) == [where])


def options(disk: Path) -> tuple[str, ...]:
    return (f"run.folder={disk}", "trainer.checkpoint.interval=1", "trainer.samples_interval=1")


@pytest.mark.parametrize("of", ["bytes", "files"])
def test_a_full_disk_is_waited_for_and_each_step_is_trained_once(
    trainer: Start, broker: FakeBroker, disk: Path, of: str
):
    broker.change(batches_allowed=1)
    process = trainer(*options(disk), "server.metrics=true", "trainer.stall_seconds=30")
    broker.wait_until(lambda: broker.committed == [1], 120)
    fill(disk, of)
    broker.change(batches_allowed=10**9)
    wait_for_space(process, disk)
    waiting = re.compile(r'^quartet_trainer_waiting_for_disk_seconds\{run="\w+"\} (?!0\.0$)', re.MULTILINE)
    process.wait_for(lambda: waiting.search(metrics(process)))
    assert broker.committed == [1] and not list(disk.glob("checkpoints/.writing-*"))
    empty(disk)
    status, said = process.outcome(60)
    assert status == 0 and "Traceback" not in said, said
    assert broker.trained == [0, 1, 2] and broker.committed[-1] == 3 and broker.session_epoch == 1
    assert [step for step, _ in ledger(disk)] == [0, 1, 2]
    (warning,) = re.findall(r"the disk of '\S+checkpoints' is full: \S+ bytes are needed, \S+ are free", said)
    assert "0 are free" in warning if of == "bytes" else "some" not in warning
    for file in ("metrics.jsonl", "rollouts.jsonl"):
        for line in (disk / file).read_text().splitlines():
            json.loads(line)


def metrics(process: TrainerProcess) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port + 100}/metrics", timeout=10) as answer:
        return answer.read().decode()


def ledger(disk: Path) -> list[tuple[int, list[str]]]:
    newest = find_checkpoints(disk / "checkpoints")[-1]
    return read_ledger(disk / "checkpoints" / "ledger.jsonl", newest.manifest["ledger"])


def test_a_trainer_that_waits_for_space_can_be_stopped_and_started(trainer: Start, broker: FakeBroker, disk: Path):
    broker.change(batches_allowed=1)
    process = trainer(*options(disk))
    broker.wait_until(lambda: broker.committed == [1], 120)
    fill(disk, "bytes")
    broker.change(batches_allowed=10**9)
    wait_for_space(process, disk)
    process.send(signal.SIGTERM)
    status, said = process.outcome(20)
    assert status == 0 and "Traceback" not in said, said
    assert [found.step for found in find_checkpoints(disk / "checkpoints")] == [1]
    process = trainer(*options(disk))
    wait_for_space(process, disk)
    assert not broker.opened[1:], "it begins when it can keep its books"
    empty(disk)
    assert process.wait(60) == 0
    assert sorted(set(broker.trained)) == [0, 1, 2] and broker.committed[-1] == 3
    assert [step for step, _ in ledger(disk)] == [0, 1, 2]
