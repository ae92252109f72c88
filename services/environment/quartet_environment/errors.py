"""The failures of the environment service."""


class EpisodeFailed(Exception):
    """An episode was not played to its end; another try may be. The arguments are those of the contract's message."""

    def __init__(self, message: str, place: str = "", traceback: str = ""):
        super().__init__(message)
        self.message, self.place, self.traceback = message, place, traceback


class PoolFull(Exception):
    """No process can take another episode now."""
