"""The failures of the environment service."""


class EpisodeFailed(Exception):
    """An episode was not played to its end. The arguments are the fields of the contract's EpisodeFailure."""

    def __init__(self, message: str, retryable: bool = True, place: str = "", traceback: str = ""):
        super().__init__(message)
        self.message, self.retryable, self.place, self.traceback = message, retryable, place, traceback


class PoolFull(Exception):
    """No process can take another episode now."""
