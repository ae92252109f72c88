"""Tools for environments: programs in the reward service's sandbox, over gRPC."""

import grpc
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.durations import to_duration, to_seconds
from quartet_common.errors import AWAY, describe, retry_delay
from quartet_common.outage import Outage
from quartet_rollout.environments.base import EnvironmentFailed, Execution


class RewardTools:
    """`Tools` of the reward service."""

    def __init__(self, channel: grpc.aio.Channel, wait_seconds: float):
        """`wait_seconds`: longest wait in the service's queue, per call."""
        self._stub = reward_pb2_grpc.RewardServiceStub(channel)
        self._wait_seconds = wait_seconds
        self._away = False

    @property
    def away(self) -> bool:
        return self._away

    async def execute(
        self,
        source: str,
        *,
        stdin: str = "",
        timeout_seconds: float = 10.0,
        memory_bytes: int = 0,
        output_bytes: int = 0,
        run_id: str = "",
    ) -> Execution:
        """See `Tools.execute`. Programs have no effect outside the sandbox, so a call may be retried."""
        limits = reward_pb2.ExecutionLimits(
            wall_time=to_duration(timeout_seconds), memory_bytes=memory_bytes, output_bytes=output_bytes
        )
        request = reward_pb2.ExecuteRequest(language="python", source=source, stdin=stdin, limits=limits, run_id=run_id)
        outage = Outage()
        while True:
            try:
                response = await self._stub.Execute(request, timeout=timeout_seconds + self._wait_seconds)
            except grpc.RpcError as error:
                self._away = error.code() in AWAY
                if not self._away and error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise EnvironmentFailed(f"the reward service did not run a program: {describe(error)}") from error
                await outage.wait(retry_delay(error))
                continue
            self._away = False
            outcome = reward_pb2.ExecutionOutcome.Name(response.outcome).removeprefix("EXECUTION_OUTCOME_").lower()
            return Execution(
                outcome, response.exit_code, response.stdout, response.stderr, to_seconds(response.elapsed)
            )
