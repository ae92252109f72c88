"""A callback that logs a training's events to a file in the run's folder."""

from pathlib import Path
from typing import TextIO

from quartet_trainer.callbacks import BatchEvent, Callback, Parameters, TrainingFacts, UpdateEvent


class DiaryParameters(Parameters):
    file: Path
    fail_at: int = -1


class Diary(Callback):
    def __init__(self, file: TextIO, fail_at: int) -> None:
        self.file = file
        self.fail_at = fail_at

    def on_episode(self, data_pass: int, step: int) -> None:
        self.file.write(f"pass {data_pass} begins with step {step}\n")

    def on_batch(self, batch: BatchEvent) -> None:
        self.file.write(f"step {batch.step}: {len(batch.groups)} groups\n")

    def on_update(self, update: UpdateEvent) -> None:
        self.file.write(f"step {update.step} done: reward {update.metrics['reward/mean']:.3f}\n")
        if update.step == self.fail_at:
            raise RuntimeError(f"asked to, at step {update.step}")

    def close(self) -> None:
        self.file.write("closed\n")
        self.file.close()


class DiaryStarter:
    name = "diary"
    description = "Logs a training's events to a file in the run's folder."
    parameters = DiaryParameters

    def start(self, training: TrainingFacts, parameters: DiaryParameters) -> Callback:
        file = (training.folder / parameters.file).open("a", encoding="utf-8")
        file.write(f"run {training.run_id} from step {training.first_step}\n")
        return Diary(file, parameters.fail_at)
