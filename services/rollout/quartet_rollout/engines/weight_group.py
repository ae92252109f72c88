"""The weight methods of `Engine` up to the installation. The engine's workers are members of the weight group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quartet_rollout.errors import EngineError, WeightTransferError, unpack_error
from quartet_rollout.weight_sync.spec import ModelSpec, WeightGroupInfo

if TYPE_CHECKING:
    import torch
    from quartet.v1 import rollout_pb2

    from quartet_rollout.weight_sync.receiver import WeightReceiver

GRACE_SECONDS = 1.0
"""How long after the transport's own deadline a call is abandoned."""
POLL_SECONDS = 0.01
"""Interval at which the workers are polled for the end of a transfer."""


class WeightGroupMixin:
    """Joins the group, receives weights and computes checksums, each within a deadline.

    By default the one member is this process (`received_tensors`). An engine that computes in other processes has a
    `WeightReceiver` in each, and overrides `call_members`.
    """

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._spec: ModelSpec | None = None
        self._transports: list[str] = []

    @property
    def failure(self) -> str:
        """See `Engine.failure`."""
        return ""

    async def load_spec(self) -> None:
        """Read the model's names and shapes. Call it once, in `start`."""
        from quartet_rollout.weight_sync.transports import transports

        self._spec = await asyncio.to_thread(ModelSpec.of_folder, self._model_path)
        self._transports = transports()

    def weight_capabilities(self) -> list[str]:
        """Return the part of `Engine.capabilities` that is about weights."""
        ways = (f"weights.{name}" for name in self._transports)
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
        names = list(self.spec.shapes)
        await self._transfer(info.timeout_seconds, "joining the weight group", "join", asdict(info), names)

    async def leave_weight_group(self) -> None:
        if self._spec is not None:
            with suppress(EngineError):  # An engine that has failed is in no group.
                await self.call_members("leave")

    async def receive_weights(
        self, manifest: rollout_pb2.WeightManifest, timeout_seconds: float, path: str = ""
    ) -> list[int]:
        self.check_manifest(manifest)
        arguments = manifest.SerializeToString(), timeout_seconds, path
        first, *others = await self._transfer(timeout_seconds, "the transfer", "receive", *arguments)
        if any(other != first for other in others):
            await self.leave_weight_group()
            raise WeightTransferError("the engine's workers did not receive the same bytes")
        return first

    async def call_members(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every member's `WeightReceiver`, one that does not block; return the results."""
        return [getattr(self._receiver, method)(*args)]

    def received_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this process received, for the installation. Raises EngineError when nothing was."""
        return self._receiver.tensors()

    @cached_property
    def _receiver(self) -> WeightReceiver:
        from quartet_rollout.weight_sync.receiver import WeightReceiver

        return WeightReceiver(self._model_path)

    async def _transfer(self, seconds: float, what: str, method: str, *args: Any) -> list[Any]:
        """Begin a call in every member and poll until all have ended; return the results. All leave the group when one
        fails, at the deadline, or when this is cancelled."""
        try:
            await self.call_members("begin", method, *args)
            async with asyncio.timeout(seconds + GRACE_SECONDS):
                while True:
                    ends = await self.call_members("poll")
                    for failed in (end for end in ends if end and end[0]):
                        raise unpack_error(failed)
                    if None not in ends:
                        return [result for _, result in ends]
                    await asyncio.sleep(POLL_SECONDS)
        except BaseException as error:
            await self.leave_weight_group()
            if isinstance(error, TimeoutError):
                raise WeightTransferError(f"{what} took longer than {seconds:g} s") from error
            raise
