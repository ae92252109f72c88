"""vLLM's engine core as it is talked to: in this process, or in processes of its own.

Both are vLLM's clients of its engine core. What vLLM waits for without end when the other process has died is waited
for here with a look at that process.
"""

from __future__ import annotations

import os
import queue
import uuid
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs

_LOOK_SECONDS = 1.0


class Client:
    """The engine core in this process. Every call computes, and returns when it is done."""

    computes_ahead = False
    """Whether tokens are generated between two calls of `outputs`."""

    def __init__(self, config: VllmConfig) -> None:
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.executor import Executor

        self.vllm: Any = EngineCoreClient.make_client(
            multiprocess_mode=self.computes_ahead,
            asyncio_mode=False,
            vllm_config=config,
            executor_class=Executor.get_class(config),
            log_stats=True,  # How many run, and how full the KV cache is.
        )

    def outputs(self) -> EngineCoreOutputs:
        """The outputs of one step."""
        return self.vllm.get_output()

    def ready_outputs(self) -> list[EngineCoreOutputs]:
        """The outputs of steps that have been made already."""
        return []

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core."""
        return getattr(self.vllm.engine_core, method)(*args)

    def workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of each worker."""
        return self.call("collective_rpc", method, None, args, None)

    def close(self) -> None:
        """Free everything."""
        self.vllm.shutdown()


class ProcessClient(Client):
    """The engine core, and with tensor parallelism its workers, in processes of their own."""

    computes_ahead = True

    def __init__(self, config: VllmConfig) -> None:
        from quartet_rollout.engines.vllm_engine.worker import OWNER

        os.environ[OWNER] = str(os.getpid())
        super().__init__(config)

    def outputs(self) -> EngineCoreOutputs:
        while True:
            try:
                outputs = self.vllm.outputs_queue.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                self.vllm.ensure_alive()
                continue
            if isinstance(outputs, Exception):
                raise outputs
            return outputs

    def ready_outputs(self) -> list[EngineCoreOutputs]:
        ready = []
        while not self.vllm.outputs_queue.empty():
            ready.append(self.outputs())
        return ready

    def call(self, method: str, *args: Any) -> Any:
        from vllm.v1.engine import EngineCoreRequestType

        number = uuid.uuid4().int >> 65
        answer: Future[Any] = Future()
        self.vllm.utility_results[number] = answer
        self.vllm._send_input(EngineCoreRequestType.UTILITY, (0, number, method, args))
        while True:
            try:
                return answer.result(_LOOK_SECONDS)
            except TimeoutError:
                self.vllm.ensure_alive()
