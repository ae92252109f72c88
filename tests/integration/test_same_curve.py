"""With max_staleness 0 a run of the four services equals the training of a plain PyTorch loop, step by step."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from preloaded import Pythons

STEPS = 10

DUMP = """
import json

from quartet_trainer.callbacks import Callback, Parameters


class DumpParameters(Parameters):
    file: str


class Dump(Callback):
    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")

    def on_batch(self, batch):
        groups = [group.SerializeToString().hex() for group in batch.groups]
        self.file.write(json.dumps({"groups": groups}) + "\\n")

    def close(self):
        self.file.close()


class DumpStarter:
    name = "dump"
    description = "Writes every batch into a file."
    parameters = DumpParameters

    def start(self, training, parameters):
        return Dump(parameters.file)
"""


@pytest.fixture
def dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a callback that writes the batches; return its file."""
    site = tmp_path / "site"
    information = site / "dump-1.0.dist-info"
    information.mkdir(parents=True)
    (site / "dump_batches.py").write_text(DUMP, encoding="utf-8")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: dump\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text("[quartet.callbacks]\ndump = dump_batches:DumpStarter\n")
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    return tmp_path / "batches.jsonl"


@pytest.mark.timeout(600)
def test_each_steps_loss_is_that_of_a_plain_loop(by_hand, pythons: Pythons, dump: Path, model: Path):
    """The plain loop has only the initial weights and the batches. The rollouts' log-probs must equal its own before
    each step, which shows that the batches were generated with its weights."""
    services = by_hand(
        run__max_steps=STEPS,
        run__max_staleness=0,
        run__verifiers="[{name='length', parameters={buffer_tokens=30}}]",
        trainer__callbacks=f"[{{name='dump', parameters={{file='{dump}'}}}}]",
        trainer__evaluation__interval=0,
        trainer__evaluation__before_training="false",
        trainer__evaluation__at_end="false",
        trainer__checkpoint__interval=0,
    )
    services.run_all()
    found = services.rows("step")
    assert [record["step"] for record in found] == list(range(STEPS)), services.logs()
    assert all(record["staleness/max"] == 0 for record in found)

    program = Path(__file__).with_name("plain_curve.py")
    command = [pythons["trainer"], program, model, dump]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    expected = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["train/loss"] for record in found] == pytest.approx([one["loss"] for one in expected], abs=1e-4)
    assert max(one["difference"] for one in expected) < 1e-3
    # Most steps have a gradient: not all completions of a group are equally long.
    assert sum(record["train/grad_norm"] > 0 and abs(record["train/loss"]) > 1e-6 for record in found) > STEPS / 2
