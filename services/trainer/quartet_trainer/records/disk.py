"""What cannot be written ends the training with a sentence: a run whose records are lost is not worth its machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quartet_trainer.errors import TrainingError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise TrainingError, naming `path` and the system's reason, for an OSError inside the block."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise TrainingError(f"cannot write '{path}': {reason}; the run goes on from its last checkpoint") from error
