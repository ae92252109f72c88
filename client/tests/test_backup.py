"""`quartet backup` and `quartet restore` on a real broker and Redis: what docs/backup.md promises."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from quartet.v1 import broker_pb2 as pb
from real_broker import Life

from quartet_client.cli.main import main
from quartet_common.ledger import Ledger

STEP = "step-00000002"


class Run:
    """A run that goes on: prompts are leased, two steps are trained and in a checkpoint that is written by hand."""

    def __init__(self, broker, root: Path):
        self.broker, self.root, self.checkpoints = broker, root, root / "checkpoints"
        self.life = Life(broker.address, "demo", groups_per_step=2, max_staleness=8)
        self.life.submit(*(f"pass-0/{n}" for n in range(8)))
        self.life.answer(6)
        self.ledger = Ledger(self.checkpoints / "ledger.jsonl")
        for step in range(2):
            self.ledger.append(step, self.life.train(step))
        self.checkpoint(2)
        self.life.commit(2)
        leased = self.life.call("LeasePrompts", pb.LeasePromptsRequest(run_id="demo", holder="r1", max_prompts=1))
        assert len(leased.leases) == 1

    def checkpoint(self, step: int) -> None:
        folder = self.checkpoints / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes([step]) * 1000)
        manifest = {
            "step": step,
            "run_id": "demo",
            "run_created_at": self.life.now().created_at.ToJsonString(),
            "ledger": self.ledger.mark(),
            "files": {"weights": 1000},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def run(broker, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        f"[run]\nid = 'demo'\nfolder = '{tmp_path}'\n"
        f"[addresses]\nbroker = '{broker.address}'\n"
        f"[broker]\nredis_url = 'redis://127.0.0.1:{broker.redis_port}/0'\n"
    )
    return Run(broker, tmp_path)


@pytest.fixture
def quartet(capsys):
    """Run `quartet` with the run file; return its exit status and what it says, errors too."""

    def call(*arguments: str) -> tuple[int, str]:
        status = main([*arguments, "--config", "run.toml"])
        return status, "".join(capsys.readouterr())

    return call


@pytest.fixture
def backup(run, quartet) -> Path:
    status, said = quartet("backup", "saved")
    assert status == 0 and "run demo at step 2, 2 committed, checkpoint at step 2; 5 files" in said, said
    return run.root / "saved"


def test_redis_and_a_checkpoint_are_lost_and_restored(run, quartet, backup):
    before = quartet("audit", "demo")
    assert before[0] == 0 and "4 exactly once, 0 lost" in before[1]
    run.broker.forget_all_runs()
    (run.checkpoints / STEP / "weights").unlink()
    status, said = quartet("restore", "saved")
    assert status == 0 and f"{STEP} put back" in said and "then the trainer" in said, said
    assert quartet("audit", "demo") == before
    assert (run.checkpoints / STEP / "weights").read_bytes() == bytes([2]) * 1000
    run.life.session = 0
    run.life.session = run.life.call(
        "OpenSession", pb.OpenSessionRequest(run_id="demo", holder="t2", checkpoint_step=2)
    ).session_epoch
    assert len(run.life.train(2)) == 2


def test_the_whole_folder_of_checkpoints_is_put_back(run, quartet, backup):
    shutil.rmtree(run.checkpoints)
    run.broker.forget_all_runs()
    assert quartet("restore", "saved")[0] == 0
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["ledger.jsonl", STEP]
    assert quartet("audit", "demo")[0] == 0


def test_a_checkpoint_of_changed_bytes_is_put_back(run, quartet, backup):
    weights = run.checkpoints / STEP / "weights"
    weights.write_bytes(bytes(1000))
    assert f"{STEP} put back" in quartet("restore", "saved", "--replace")[1]
    assert weights.read_bytes() == bytes([2]) * 1000


def test_a_checkpoint_that_the_trainer_removes_meanwhile_is_left_for_a_newer_one(run, quartet, monkeypatch):
    copyfile = shutil.copyfile

    def copy(source: Path, to: Path) -> None:
        if source.parent.name == STEP:
            run.ledger.append(2, run.life.train(2))
            run.checkpoint(3)
            shutil.rmtree(source.parent)
        copyfile(source, to)

    monkeypatch.setattr(shutil, "copyfile", copy)
    status, said = quartet("backup", "saved")
    assert status == 0 and "checkpoint at step 3" in said
    assert [path.name for path in (run.root / "saved" / "checkpoints").glob("*/")] == ["step-00000003"]


def test_a_later_checkpoint_and_its_ledger_are_kept(run, quartet, backup):
    run.ledger.append(2, run.life.train(2))
    run.checkpoint(3)
    kept = (run.checkpoints / "ledger.jsonl").read_bytes()
    run.broker.forget_all_runs()
    status, said = quartet("restore", "saved")
    assert status == 0 and "nothing was missing" in said
    assert (run.checkpoints / "ledger.jsonl").read_bytes() == kept
    assert "books at step 2, checkpoint at step 3" in quartet("audit", "demo")[1]  # until a trainer settles them


def test_a_checkpoint_whose_ledger_is_lost_is_told(run, quartet, backup):
    run.ledger.append(2, run.life.train(2))
    run.checkpoint(3)
    (run.checkpoints / "ledger.jsonl").unlink()
    run.broker.forget_all_runs()
    status, said = quartet("restore", "saved")
    assert status == 2 and "nor has the backup that checkpoint's ledger: move the checkpoint away" in said
    shutil.rmtree(run.checkpoints / "step-00000003")
    assert quartet("restore", "saved")[0] == 0 and quartet("audit", "demo")[0] == 0


def test_a_run_that_redis_has_is_replaced_only_if_asked(run, quartet, backup):
    run.life.submit("later")
    status, said = quartet("restore", "saved")
    assert status == 2 and "Redis has a run 'demo', which is active; add --replace" in said
    assert quartet("trace", "later")[0] == 0
    assert quartet("restore", "saved", "--replace")[0] == 0
    assert quartet("trace", "later")[0] != 0 and quartet("audit", "demo")[0] == 0


def test_a_damaged_or_incomplete_backup_is_refused_and_nothing_restored(run, quartet, backup):
    run.broker.forget_all_runs()
    shutil.rmtree(run.checkpoints)
    for name in ("redis/books", "redis/values", f"checkpoints/{STEP}/weights", "checkpoints/ledger.jsonl"):
        path = backup / name
        data = path.read_bytes()
        for harmed in (data[:-1], bytes([data[0] ^ 1]) + data[1:]):
            path.write_bytes(harmed)
            status, said = quartet("restore", "saved")
            assert status == 2 and f"saved/{name}' was altered" in said, said
        path.unlink()
        status, said = quartet("restore", "saved")
        assert status == 2 and f"saved/{name}' is missing" in said, said
        path.write_bytes(data)
    manifest = backup / "manifest.json"
    facts = json.loads(manifest.read_text())
    for text in ("[]", "{", "{}", json.dumps(facts | {"run_id": "other"})):
        manifest.write_text(text)
        status, said = quartet("restore", "saved")
        assert status == 2 and "saved/manifest.json' was altered" in said, said
    manifest.unlink()
    status, said = quartet("restore", "saved")
    assert status == 2 and "is no complete backup: it has no manifest.json" in said, said
    assert not run.checkpoints.exists()
    assert quartet("runs", "show", "demo")[0] == 2


def test_what_an_interrupted_backup_left_is_no_backup_and_is_replaced(run, quartet, backup):
    left = backup.rename(run.root / ".saved.writing")
    (left / "manifest.json").unlink()
    status, said = quartet("restore", ".saved.writing")
    assert status == 2 and "is no complete backup" in said
    assert quartet("backup", "saved")[0] == 0
    assert sorted(path.name for path in run.root.iterdir()) == ["checkpoints", "run.toml", "saved"]


def test_a_backup_that_fails_leaves_no_folder(run, quartet, backup):
    assert "exists: name a new folder" in quartet("backup", "saved")[1]
    status, said = quartet("backup", "other", "--run", "nobody")
    assert status == 2 and "Redis has no run 'nobody'; its newest runs: demo" in said
    shutil.rmtree(run.checkpoints)
    status, said = quartet("backup", "other")
    assert status == 2 and "2 committed steps, but the newest complete checkpoint in" in said
    (run.root / "run.toml").write_text(f"[run]\nid = 'demo'\nfolder = '{run.root}'\n")
    (run.root / "sockets").mkdir()  # as `quartet run` has it
    with socket.socket(socket.AF_UNIX) as closed:  # which does not listen
        closed.bind("sockets/redis.sock")
        status, said = quartet("backup", "other")
    assert status == 2 and "sockets/redis.sock does not answer" in said and "start it, or set broker.redis_url" in said
    assert sorted(path.name for path in run.root.iterdir()) == ["run.toml", "saved", "sockets"]
