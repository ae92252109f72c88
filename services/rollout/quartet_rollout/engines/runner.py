"""A core on one thread, which between two of its steps does what others ask for."""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quartet_common.log import get_logger
from quartet_rollout.engines.base import UNKNOWN_VERSION, EngineError, EngineStats
from quartet_rollout.engines.core import Core
from quartet_rollout.engines.stepping import Mail, Stepping

log = get_logger(__name__)


@dataclass(frozen=True)
class Facts:
    """What is known of a core once it is there."""

    max_model_len: int
    vocab_size: int
    gives_masks: bool
    can_sleep: bool


class Runner:
    """`run` belongs to the core's thread; everything else may be called from any other."""

    def __init__(
        self,
        name: str,
        build: Callable[[], Core],
        deliver: Callable[[list[Mail]], None],
        before_pass: Callable[[bool], None] = lambda idle: None,
    ) -> None:
        """Nothing runs yet.

        Args:
            name: the engine's, for what is said of its failures.
            build: makes the core, on its thread; may raise EngineError.
            deliver: takes completions, on the core's thread.
            before_pass: called on the core's thread before it looks for commands and steps; told whether there is
                nothing to step, so that it waits.
        """
        self._name, self._build, self._deliver, self._before_pass = name, build, deliver, before_pass
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Below: changed by the core's thread alone.
        self._stepping: Stepping | None = None
        self._failure: EngineError | None = None
        self._stop = False

    @property
    def stats(self) -> EngineStats:
        """As of the last step or command."""
        return self._stepping.stats if self._stepping is not None else EngineStats(0, 0, -1.0, 0)

    @property
    def policy_version(self) -> int:
        """The version of the installed weights, -1 where that is not known."""
        return self._stepping.policy_version if self._stepping is not None else UNKNOWN_VERSION

    @property
    def failure(self) -> str:
        """Why the core is lost; "" while it is not."""
        return str(self._failure or "")

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Call a method of `Stepping` between two steps. The future has what it returns, or what the future that it
        returns has; EngineError, also when the core has failed. Not after `close`."""
        answer: Future[Any] = Future()

        def command() -> None:
            try:
                if self._failure is not None:
                    raise self._failure
                result = getattr(self._stepping, method)(*args)
            except EngineError as error:
                answer.set_exception(error)
            except Exception as error:
                answer.set_exception(self._fail(error))
            else:
                if isinstance(result, Future):
                    result.add_done_callback(lambda done: _copy(done, answer))
                else:
                    answer.set_result(result)

        self._commands.put(command)
        return answer

    def close(self) -> None:
        """End every request and, soon, `run`."""
        self._commands.put(self._close)

    def run(self, started: Future[Facts]) -> None:
        """Make the core and step it until it is closed."""
        try:
            core = self._build()
        except EngineError as error:
            started.set_exception(error)
            return
        except Exception as error:
            log.exception("the engine did not start")
            started.set_exception(EngineError(f"the {self._name} engine did not start: {error}"))
            return
        self._stepping = stepping = Stepping(core, self._deliver)
        started.set_result(Facts(core.max_model_len, core.vocab_size, core.gives_masks, core.can_sleep))
        while not self._stop:
            try:
                idle = self._failure is not None or not stepping.can_step()
                self._before_pass(idle)
                self._run_commands(wait=idle)
                if self._failure is None and not self._stop and stepping.can_step():
                    stepping.step()
            except Exception as error:
                self._fail(error)
        core.close()

    def _run_commands(self, wait: bool) -> None:
        """Run what has come; `wait` for something first."""
        if wait:
            self._commands.get()()
        with suppress(queue.Empty):
            while not self._stop:
                self._commands.get_nowait()()
        if self._failure is None and self._stepping is not None:
            self._stepping.publish_stats()

    def _fail(self, error: Exception) -> EngineError:
        """The core is lost: tell everybody who waits. Returns what they are told."""
        log.exception("the engine failed")
        self._failure = EngineError(f"the {self._name} engine failed: {error}")
        if self._stepping is not None:
            self._stepping.fail(self._failure)
        return self._failure

    def _close(self) -> None:
        if self._failure is None and self._stepping is not None:
            self._stepping.abort_all()
            self._stepping.fail(EngineError("the engine is closed"))  # Whoever waits for a pause.
        self._stop = True


def _copy(done: Future[Any], answer: Future[Any]) -> None:
    if (error := done.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(done.result())
