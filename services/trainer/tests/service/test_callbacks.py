"""A user's own callback: a distribution as an installer leaves it, found by its entry point, called by a training."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from training import Train

from quartet_common.config import ConfigError
from quartet_trainer.callbacks import CallbackSection, check_callbacks
from quartet_trainer.errors import TrainingError

pytestmark = pytest.mark.timeout(180)

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "extensions" / "quartet_extensions" / "diary.py"
"""The callback that the docs show."""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave what an installer leaves: a module, its metadata and its entry point, on the path."""
    folder = tmp_path / "site"
    information = folder / "my_diary-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "my_diary.py").write_text(EXAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-diary\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text("[quartet.callbacks]\ndiary = my_diary:DiaryStarter\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_diary", raising=False)
    return folder


def test_the_docs_example_is_called_in_order(installed: Path, train: Train) -> None:
    training = train("trainer.callbacks=[{name='diary', parameters={file='diary.txt'}}]")
    assert training.start().join() == "all steps are done"
    lines = (training.folder / "diary.txt").read_text(encoding="utf-8").splitlines()
    rewards = [json.loads(line)["reward/mean"] for line in (training.folder / "metrics.jsonl").open(encoding="utf-8")]
    assert lines == [
        "run test from step 0",
        "pass 0 begins with step 0",
        *(
            line
            for step in range(3)
            for line in (f"step {step}: 2 groups", f"step {step} done: reward {rewards[step]:.3f}")
        ),
        "closed",
    ]


def test_one_that_fails_ends_the_training_and_is_named(installed: Path, train: Train) -> None:
    """Its `on_update` cannot write into a folder that is gone; the steps until then stand."""
    training = train("trainer.callbacks=[{name='diary', parameters={file='diary.txt', fail_at=1}}]").start()
    with pytest.raises(TrainingError, match=r"callback 'diary' failed in on_update: RuntimeError: asked to, at step 1"):
        training.join()
    assert len((training.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert (training.folder / "diary.txt").read_text(encoding="utf-8").endswith("closed\n")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "dairy"}, r"trainer.callbacks\[0\].name: there is no callback 'dairy'; there are: diary, wandb"),
        ({"name": "diary"}, r"trainer.callbacks\[0\].parameters.file: got {}; Field required"),
    ],
)
def test_what_is_wrong_is_said_before_the_start(installed: Path, section: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_callbacks([CallbackSection(**section)])


FILE = """
from quartet_trainer.callbacks import Callback

class Rewards(Callback):
    def __init__(self, training, name="rewards.txt"):
        super().__init__(training)
        self.file = training.folder / name
    def on_update(self, update):
        with self.file.open("a") as file:
            file.write(f"{update.step} of {self.training.max_steps}: {update.metrics['reward/mean']}\\n")

class Other: pass
def function(training): pass
"""


def test_a_class_of_a_file_is_called(tmp_path: Path, train: Train) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    training = train(f"trainer.callbacks=['{tmp_path}/mine.py:Rewards']")
    assert training.start().join() == "all steps are done"
    rewards = [json.loads(line)["reward/mean"] for line in (training.folder / "metrics.jsonl").open(encoding="utf-8")]
    lines = (training.folder / "rewards.txt").read_text(encoding="utf-8").splitlines()
    assert lines == [f"{step} of 3: {reward}" for step, reward in enumerate(rewards)] and len(lines) == 3


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "FOLDER/mine.py:Gone"}, "file: '.*mine.py' has no function 'Gone'; it has: Rewards, Other, function"),
        ({"file": "FOLDER/none.py:Rewards"}, "file: there is no file '.*none.py'"),
        (
            {"file": "FOLDER/mine.py:Rewards", "parameters": {"nam": 1}},
            "parameters: .* got an unexpected keyword .*'nam'",
        ),
        (
            {"file": "FOLDER/mine.py:function"},
            r"file: '.*mine.py:function' must be a subclass of .*callbacks\.Callback",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_the_start(tmp_path: Path, section: dict, message: str) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    given = json.loads(json.dumps(section).replace("FOLDER", str(tmp_path)))
    with pytest.raises(ConfigError, match=rf"trainer.callbacks\[0\]\.{message}"):
        check_callbacks([CallbackSection(**given)])


def history(folder: Path) -> list[dict[str, float]]:
    """What W&B has written below a folder, row by row, without its own entries."""
    datastore = pytest.importorskip("wandb.sdk.internal.datastore")
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    store = datastore.DataStore()
    store.open_for_scan(str(file))
    rows = []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in items.items() if not name.startswith("_")})
    return rows


def test_weights_and_biases_get_every_metric_offline(train: Train) -> None:
    training = train("trainer.callbacks=[{name='wandb', parameters={tags=['a test'], group='seeds', run_name='own'}}]")
    assert training.start().join() == "all steps are done"
    (tables,) = training.folder.glob("wandb/offline-run-*/files/media/table")
    table = json.loads(next(tables.glob("samples*.json")).read_text())
    assert table["columns"][:3] == ["prompt", "completion", "reward"] and table["data"]
    rows = [json.loads(line) for line in (training.folder / "metrics.jsonl").open(encoding="utf-8")]
    told = [row for row in history(training.folder) if "reward/mean" in row]  # the others are of samples
    assert [row["step"] for row in told] == [row["step"] for row in rows] == [0, 1, 2]
    for sent, written in zip(told, rows, strict=True):
        metrics = {name: value for name, value in written.items() if "/" in name}
        assert metrics.items() <= sent.items() and "reward/mean" in metrics
