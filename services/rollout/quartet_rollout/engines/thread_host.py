"""A core on a daemon thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from quartet_rollout.engines.base import UNKNOWN_VERSION, EngineError, EngineStats
from quartet_rollout.engines.core import Core
from quartet_rollout.engines.runner import Facts, Runner
from quartet_rollout.engines.stepping import Mail

if TYPE_CHECKING:
    import torch


class ThreadHost:
    """`Host` over a `Runner` whose thread shares the interpreter with the event loop."""

    def __init__(self, name: str, build: Callable[[], Core]) -> None:
        """`build` makes the core, on the thread, and may raise EngineError."""
        self._name, self._build = name, build
        self._runner: Runner | None = None
        self._thread: threading.Thread

    @property
    def stats(self) -> EngineStats:
        """As of the last step or command."""
        return self._runner.stats if self._runner is not None else EngineStats(0, 0, -1.0, 0)

    @property
    def policy_version(self) -> int:
        """The installed weights'."""
        return self._runner.policy_version if self._runner is not None else UNKNOWN_VERSION

    @property
    def failure(self) -> str:
        """See `Host.failure`."""
        return self._runner.failure if self._runner is not None else ""

    def start(self, deliver: Callable[[list[Mail]], None], lost: Callable[[EngineError], None]) -> Future[Facts]:
        """See `Host.start`; a core that fails here tells each request itself."""
        started: Future[Facts] = Future()
        self._runner = Runner(self._name, self._build, deliver)
        name = f"engine-{self._name}"
        self._thread = threading.Thread(target=self._runner.run, args=(started,), name=name, daemon=True)
        self._thread.start()
        return started

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """See `Host.ask`."""
        assert self._runner is not None
        return self._runner.ask(method, *args)

    def stage(self, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """They are where they must be."""

    def install(self, tensors: Iterator[tuple[str, torch.Tensor]], policy_version: int) -> Future[None]:
        """See `Host.install`."""
        return self.ask("install", tensors, policy_version)

    def close(self, seconds: float) -> bool:
        """See `Host.close`."""
        assert self._runner is not None
        self._runner.close()
        self._thread.join(seconds)
        return not self._thread.is_alive()
