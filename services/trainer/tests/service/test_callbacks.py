"""A user's own callback: a distribution as an installer leaves it, found by its entry point, called by a training."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_broker import FakeBroker
from training import Training

from quartet_common.config import ConfigError
from quartet_trainer import life
from quartet_trainer.callbacks import CallbackSection, check_callbacks
from quartet_trainer.errors import TrainingError

pytestmark = pytest.mark.timeout(180)

DOCS = Path(__file__).resolve().parents[4] / "docs" / "trainer.md"


def example() -> str:
    """The callback that the docs show."""
    blocks = DOCS.read_text(encoding="utf-8").split("```python\n")[1:]
    return next(block.partition("```")[0] for block in blocks if "class Diary(" in block)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave what an installer leaves: a module, its metadata and its entry point, on the path."""
    folder = tmp_path / "site"
    information = folder / "my_diary-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "my_diary.py").write_text(example(), encoding="utf-8")
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-diary\nVersion: 1.0\n", encoding="utf-8")
    (information / "entry_points.txt").write_text("[quartet.callbacks]\ndiary = my_diary:DiaryStarter\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_diary", raising=False)
    return folder


@pytest.fixture
def train(broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Training]]:
    """Make a Training against `broker`; it is stopped after the test."""
    made: list[Training] = []

    def make(*overrides: str) -> Training:
        training = Training(broker, tmp_path / "run", *overrides)
        monkeypatch.setattr(life, "_load", lambda config: training.learner)
        made.append(training)
        return training

    yield make
    for training in made:
        training.control.stop()
        if training._thread.ident is not None:
            training._thread.join(30)


def test_the_docs_example_is_called_in_order(installed: Path, train: Callable[..., Training]) -> None:
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


def test_one_that_fails_ends_the_training_and_is_named(installed: Path, train: Callable[..., Training]) -> None:
    """Its `on_update` cannot write into a folder that is gone; the steps until then stand."""
    training = train("trainer.callbacks=[{name='diary', parameters={file='diary.txt', fail_at=1}}]").start()
    with pytest.raises(TrainingError, match=r"callback 'diary' failed in on_update: RuntimeError: asked to, at step 1"):
        training.join()
    assert len((training.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2
    assert (training.folder / "diary.txt").read_text(encoding="utf-8").endswith("closed\n")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "dairy"}, r"trainer.callbacks\[0\].name: there is no callback 'dairy'; there are: diary"),
        ({"name": "diary"}, r"trainer.callbacks\[0\].parameters of 'diary': file: Field required"),
        (
            {"name": "diary", "parameters": {"file": "a", "colour": 1}},
            r"trainer.callbacks\[0\].parameters of 'diary': colour: Extra inputs are not permitted",
        ),
    ],
)
def test_what_is_wrong_is_said_before_the_start(installed: Path, section: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_callbacks([CallbackSection(**section)])


def test_without_any_installed_there_is_none() -> None:
    with pytest.raises(ConfigError, match="there is no callback 'diary'; no installed package brings any"):
        check_callbacks([CallbackSection(name="diary")])
