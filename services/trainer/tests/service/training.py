"""A whole training in a thread of the test, with a learner that learns nothing."""

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_broker import FakeBroker
from quartet.v1 import broker_pb2, common_pb2, experience_pb2, tensor_pb2

from quartet_common.config import load_config
from quartet_trainer import training_run
from quartet_trainer.batch import decode_group
from quartet_trainer.checkpoints import atomic_folder
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control
from quartet_trainer.status import Status


class CountingLearner:
    """What the training calls of a Learner; its only weight is the number of steps."""

    lora = None
    checkpoint_bytes = 0
    parameters = 4

    def __init__(self) -> None:
        self.step = 0
        self.before_step: Callable[[int], None] = lambda step: None
        self.before_write: Callable[[int], None] = lambda step: None
        self.exported: Path | None = None

    def train_step(self, groups: Sequence[experience_pb2.GroupTensors]) -> dict[str, float]:
        self.before_step(self.step)
        self.step += 1
        completions = sum(len(group.completion_token_ids.lengths) for group in groups)
        tokens = sum(sum(group.completion_token_ids.lengths) for group in groups)
        return {
            "loss": 0.5,
            "reward_mean": 0.5,
            "ans_acc": 0.5,
            "completions": float(completions),
            "completion_tokens": float(tokens),
            "forward_tokens": float(tokens),
            "train_step_seconds": 0.5,
        }

    def check_group(self, group: experience_pb2.GroupTensors) -> None:
        decode_group(group, vocabulary_size=100)

    def weight_specs(self) -> list[tuple[str, int, tuple[int, ...]]]:
        return [("count", tensor_pb2.DTYPE_FLOAT32, (4,))]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "count", torch.full((4,), float(self.step))

    def snapshot(self, folder: Path, facts: dict[str, Any]) -> Callable[[], None]:
        step = self.step

        def write() -> None:
            self.before_write(step)
            with atomic_folder(folder, {**facts, "step": step}):
                pass

        return write

    def load(self, folder: Path) -> None:
        self.step = json.loads((folder / "manifest.json").read_text())["step"]

    def idle(self) -> None: ...

    def stop(self) -> None: ...

    def export(self, folder: Path) -> None:
        self.exported = folder


class Training:
    """Rank 0's training thread, as the service runs it."""

    def __init__(self, broker: FakeBroker, folder: Path, *overrides: str):
        self.config = load_config(
            "trainer",
            TrainerSection,
            None,
            [
                "run.id=test",
                f"run.folder={folder}",
                f"addresses.broker={broker.address}",
                "model.path=unused",
                "trainer.tensorboard=false",
                "trainer.samples_interval=2",
                *overrides,
            ],
        )
        self.folder = folder
        self.learner = CountingLearner()
        self.control, self.status = Control(), Status("test")
        self.ending: str | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        me = broker_pb2.Member(instance_id="trainer-1", kind=common_pb2.SERVICE_KIND_TRAINER, address="127.0.0.1:1")
        around = training_run.TrainerContext(
            config=self.config,
            instance_id="trainer-1",
            me=lambda: me,
            control=self.control,
            status=self.status,
            ready=lambda: None,
        )
        try:
            self.ending = training_run.train(around)
        except BaseException as error:  # the test looks at it
            self.error = error
        finally:
            self.control.close()
            self.status.close()

    def start(self) -> "Training":
        self._thread.start()
        return self

    def start_held(self, step: int, at: str = "before_step") -> threading.Event:
        """Start, and return when the learner is about to train that step, or to write it; the event lets it."""
        reached, go_on = threading.Event(), threading.Event()

        def hold(number: int) -> None:
            if number == step:
                reached.set()
                assert go_on.wait(60), "the test did not let it go"

        setattr(self.learner, at, hold)
        self.start()
        assert reached.wait(30)
        return go_on

    def join(self, seconds: float = 60.0) -> str | None:
        """Wait for the end; returns the ending, raises what the training raised."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the training did not end"
        if self.error is not None:
            raise self.error
        return self.ending

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


Train = Callable[..., Training]


def live_until(train: Train, broker: FakeBroker, steps: int) -> Training:
    """A training that is stopped after so many steps, each with its checkpoint."""
    training = train("trainer.checkpoint.interval=1")
    broker.change(batches_allowed=steps)
    training.start()
    broker.wait_until(lambda: broker.committed[-1:] == [steps])
    training.control.stop()
    training.join()
    broker.change(batches_allowed=10**9)
    return training


@pytest.fixture
def train(broker: FakeBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Train]:
    """Make a Training against `broker`; it is stopped after the test."""
    made: list[Training] = []

    def make(*overrides: str) -> Training:
        training = Training(broker, tmp_path / "run", *overrides)
        monkeypatch.setattr(training_run, "load_learner", lambda config: training.learner)
        made.append(training)
        return training

    yield make
    for training in made:
        training.control.stop()
        if training._thread.ident is not None:
            training._thread.join(30)
