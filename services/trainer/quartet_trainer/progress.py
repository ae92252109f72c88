"""Counts the parts of the training that this process has done, so that `stall` notices when no more are."""


class Progress:
    """Of this process; any thread may `advance` it."""

    done = 0
    sending = False
    """Whether rank 0 announces something: a rank that is stopped does not receive it."""

    def advance(self) -> None:
        """Count a part: a micro-batch, an announcement."""
        self.done += 1


PROGRESS = Progress()
