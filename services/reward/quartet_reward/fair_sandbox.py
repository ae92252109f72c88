"""The sandbox as verifiers see it: its slots are had by runs in turn."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from quartet.v1 import reward_pb2

from quartet_reward import metrics
from quartet_reward.errors import VerifierFailure
from quartet_reward.queue import FairQueue, QueueClosed
from quartet_reward.sandbox.api import Execution, Job, Sandbox, SandboxUnavailable


class FairSandbox:
    """A Sandbox that lets in as many programs as the one behind it has slots, the run that has used least first."""

    def __init__(self, sandbox: Sandbox, slots: int, queue_seconds: float):
        """`queue_seconds`: longest wait for a slot. At least two slots: a judged execution takes two."""
        self._sandbox = sandbox
        self._queue_seconds = queue_seconds
        self._queue: FairQueue[int] = FairQueue("code")
        self._queue.offer(*range(slots))

    @property
    def mode(self) -> str:
        """Which mechanisms hold, see docs/sandbox.md."""
        return self._sandbox.mode

    @property
    def waiting(self) -> int:
        """Executions that wait for a slot."""
        return self._queue.waiting

    async def run(self, job: Job) -> Execution:
        """Run one job alone, see the Protocol.

        Raises:
            SandboxUnavailable: the job could not be run, or no slot became free in time.
            VerifierFailure: SHUT_DOWN.
        """
        async with self._slots(1):
            execution = await self._sandbox.run(job)
        _count(execution)
        return execution

    async def run_judged(self, judge: Job, candidate: Job) -> tuple[Execution, Execution]:
        """Run two jobs joined by a socket pair, see the Protocol. Raises as `run`."""
        async with self._slots(2):
            executions = await self._sandbox.run_judged(judge, candidate)
        for execution in executions:
            _count(execution)
        return executions

    async def close(self) -> None:
        """Kill everything that runs; who waits has SHUT_DOWN."""
        self._queue.close()
        await self._sandbox.close()

    @asynccontextmanager
    async def _slots(self, count: int) -> AsyncIterator[None]:
        try:
            grant = await self._queue.take(timeout=self._queue_seconds, count=count)
        except TimeoutError:
            raise SandboxUnavailable(f"no slot became free within {self._queue_seconds:g} s") from None
        except QueueClosed as error:
            raise VerifierFailure(reward_pb2.FAILURE_KIND_SHUT_DOWN, str(error)) from error
        try:
            yield
        finally:
            self._queue.settle(grant)
            self._queue.offer(*grant.things)


def _count(execution: Execution) -> None:
    metrics.EXECUTIONS.labels(execution.ending.value).inc()
