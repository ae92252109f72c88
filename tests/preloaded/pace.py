"""A callback of the trainer that leaves the processors to what is done beside an endless run."""

import time

from quartet_trainer.callbacks import BatchEvent, Callback

SECONDS = 0.3


class Pace(Callback):
    def on_batch(self, batch: BatchEvent) -> None:
        """Wait, so that steps and what is generated for them take little CPU time."""
        time.sleep(SECONDS)
