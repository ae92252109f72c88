"""Counts the parts of the training that this process has done, so that `stall` notices when no more are."""

from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """One per process; any thread may `advance` it."""

    done = 0
    expected = False
    """Whether a part is under way that counts as work in every phase."""

    def advance(self) -> None:
        """Count a part: a micro-batch, a tensor that was gathered."""
        self.done += 1

    @contextmanager
    def work(self) -> Iterator[None]:
        """The block is such a part."""
        self.advance()
        self.expected = True
        try:
            yield
        finally:
            self.expected = False


PROGRESS = Progress()
