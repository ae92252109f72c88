"""Callbacks: classes in files that the run file names, called when a prompt group begins and ends on this rollout."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.config import ConfigError
from quartet_common.log import get_logger
from quartet_common.python_file import FileError, load_callable

log = get_logger(__name__)


@dataclass(frozen=True)
class GroupEnd:
    """The end of a group's delivery to this rollout; the prompt may be delivered again unless it was accepted."""

    instance: experience_pb2.PromptInstance
    outcome: str
    """The broker's answer ("accepted", "stale", "duplicate", …), or why its lease was given up without one: "refused",
    "failed", "unscored", "given_back", "cancelled" (lease lost, rollout stopping)."""
    reason: str = ""
    """Why it was given up, in words."""
    group: experience_pb2.ExperienceGroup | None = None
    """What was sent to the broker."""

    @cached_property
    def transcript(self) -> experience_pb2.GroupTranscript | None:
        """Its texts, scores and times; None without a group."""
        return None if self.group is None else experience_pb2.GroupTranscript.FromString(self.group.transcript)


class Callback:
    """Its methods run on the rollout's event loop, which waits meanwhile: they must be short.

    An exception ends the rollout, which gives its prompts back; a callback that may fail must catch its own.
    """

    def on_group_begin(self, lease: broker_pb2.PromptLease) -> None:
        """A prompt was leased, and its completions will be generated, or scored if they were kept."""

    def on_group_end(self, end: GroupEnd) -> None:
        """The group's lease has ended."""

    def close(self) -> None:
        """The rollout stops. No method is called after this."""


class Callbacks:
    """The callbacks of this rollout, in the order of the run file."""

    def __init__(self, running: Sequence[Callback], on_failed: Callable[[str], None]):
        """`on_failed` is called with the reason when a callback has failed; it must stop the service."""
        self._running, self._on_failed = running, on_failed

    def group_begins(self, lease: broker_pb2.PromptLease) -> None:
        for callback in self._running:
            with self._guarded(callback):
                callback.on_group_begin(lease)

    def group_ended(self, end: GroupEnd) -> None:
        for callback in self._running:
            with self._guarded(callback):
                callback.on_group_end(end)

    def close(self) -> None:
        for callback in self._running:
            with self._guarded(callback):
                callback.close()

    @contextmanager
    def _guarded(self, callback: Callback) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a user's code may raise anything
            name = type(callback).__name__
            log.error("callback %r failed; correct it in its file: %s", name, error, exc_info=error)
            self._on_failed(f"callback '{name}' failed")


def load_callbacks(files: Sequence[str]) -> list[Callback]:
    """Create the callbacks of `files`, "FILE.py:CLASS" each. Raises ConfigError if one cannot be loaded or created."""
    made = []
    for index, path in enumerate(files):
        where = f"rollout.callbacks[{index}]"
        try:
            named = load_callable(path)
            callback = named()
        except FileError as error:
            raise ConfigError(f"{where}: {error}") from error
        except Exception as error:  # a user's code may raise anything
            raise ConfigError(f"{where}: '{path}' failed: {type(error).__name__}: {error}; allowed: CLASS()") from error
        if not isinstance(callback, Callback):
            raise ConfigError(f"{where}: '{path}' is none; allowed: a subclass of quartet_rollout.callbacks.Callback")
        made.append(callback)
    return made
