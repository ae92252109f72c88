"""The part of a weight update that happens beside an engine: group, manifest and transfer, each with a deadline."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from quartet_rollout.engines.base import EngineError, WeightGroupInfo, WeightTransferError

if TYPE_CHECKING:
    import torch
    from quartet.v1 import rollout_pb2

    from quartet_rollout.weights.manifest import ModelSpec
    from quartet_rollout.weights.receiver import WeightReceiver

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""Beyond a deadline that the transport keeps itself: how much later its thread is given up."""


async def result_of(future: Future[T]) -> T:
    """Await another thread's future without ever cancelling it: a waiter that gives up is no reason for that thread to
    fail, and what it says afterwards interests nobody."""
    inner = asyncio.wrap_future(future)
    inner.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(inner)


class WeightUpdates:
    """Mix-in: the weight methods of `Engine` up to the installation."""

    receiver: WeightReceiver
    """Group and buffers; made by `load_spec`."""

    @property
    def failure(self) -> str:
        """See `Engine.failure`."""
        return ""

    def __init__(self, load_spec: Callable[[], ModelSpec]) -> None:
        self._load_spec = load_spec
        self._spec: ModelSpec | None = None

    async def load_spec(self) -> None:
        """Read the model's names and shapes; once, at the start."""
        from quartet_rollout.weights.adapter import Base
        from quartet_rollout.weights.receiver import WeightReceiver

        spec = await asyncio.to_thread(self._load_spec)
        self.receiver = WeightReceiver(Base(spec.folder, spec.shapes) if spec.folder is not None else None)
        self._spec = spec

    def weight_capabilities(self) -> list[str]:
        """What the handshake tells of weights."""
        from quartet_rollout.weights.transport import transports

        ways = (f"weights.{name}" for name in transports())
        return [*ways, "weights.full", "weights.lora", "weights.in_flight"]

    @property
    def spec(self) -> ModelSpec:
        """Names and shapes of the model. Raises EngineError before `load_spec`."""
        if self._spec is None:
            raise EngineError("the engine has not been started")
        return self._spec

    def check_manifest(self, manifest: rollout_pb2.WeightManifest) -> None:
        self.spec.check(manifest)

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        if self._spec is None:
            raise EngineError("the engine has not been started")
        await self._within(info.timeout_seconds, "joining the weight group", self.receiver.join, info)

    async def leave_weight_group(self) -> None:
        if self._spec is not None:
            self.receiver.leave()

    async def receive_weights(
        self, manifest: rollout_pb2.WeightManifest, timeout_seconds: float, path: str = ""
    ) -> int:
        self.check_manifest(manifest)
        receive = self.receiver.receive
        return await self._within(timeout_seconds, "the transfer", receive, manifest, timeout_seconds, path)

    def received_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What was received, to install. Raises EngineError when nothing was."""
        if self._spec is None:
            raise EngineError("the engine has not been started")
        return self.receiver.tensors()

    async def discard_weights(self) -> None:
        if self._spec is not None:
            self.receiver.discard()

    async def _within(self, seconds: float, what: str, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking call on a thread of its own. At the deadline, or when cancelled, the thread is given up and
        the group left: a collective cannot be interrupted, but nobody has to wait for it."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="weights", daemon=True).start()
        try:
            return await asyncio.wait_for(result_of(future), seconds + GRACE_SECONDS)
        except TimeoutError as error:
            self.receiver.leave()
            raise WeightTransferError(f"{what} took longer than {seconds:g} s") from error
        except asyncio.CancelledError:
            self.receiver.leave()
            raise
