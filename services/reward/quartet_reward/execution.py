"""Execute: a program of a caller, run in the sandbox; what it prints is the answer."""

from google.protobuf.duration_pb2 import Duration
from quartet.v1 import reward_pb2

from quartet_common.durations import to_duration, to_seconds
from quartet_common.errors import invalid_argument, resource_exhausted, unavailable
from quartet_reward.admission import Admission
from quartet_reward.queue import CURRENT_RUN
from quartet_reward.sandbox.api import Execution, ExitReason, Job, Limits, Sandbox, SandboxUnavailable

LANGUAGES = ("python",)
_LARGEST_SOURCE = 1 << 20
_LARGEST_STDIN = 16 << 20
_SECONDS = (0.1, 600.0)
_DEFAULT_SECONDS = 10.0
_MEMORY = (64 << 20, 64 << 30)
_DEFAULT_MEMORY = 512 << 20
_OUTPUT = (1, 16 << 20)
_DEFAULT_OUTPUT = 64 << 10

_OUTCOMES = {
    ExitReason.EXITED: reward_pb2.EXECUTION_OUTCOME_EXITED,
    ExitReason.SIGNALLED: reward_pb2.EXECUTION_OUTCOME_SIGNALLED,
    ExitReason.TIMED_OUT: reward_pb2.EXECUTION_OUTCOME_TIMED_OUT,
    ExitReason.MEMORY_EXCEEDED: reward_pb2.EXECUTION_OUTCOME_MEMORY_EXCEEDED,
    ExitReason.OUTPUT_EXCEEDED: reward_pb2.EXECUTION_OUTCOME_OUTPUT_EXCEEDED,
}


class Executor:
    """Runs callers' programs: as many wait as are admitted, and runs take turns at the sandbox's slots."""

    def __init__(self, sandbox: Sandbox, admission: Admission):
        self._sandbox, self._admission = sandbox, admission

    async def execute(self, request: reward_pb2.ExecuteRequest) -> reward_pb2.ExecuteResponse:
        """Run one program. Cancelling the task kills it.

        Raises:
            ContractError: INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNAVAILABLE, as the proto says.
        """
        job = read_job(request)
        run = request.run_id
        if not self._admission.try_take(run, 1):
            raise resource_exhausted(
                "reward.max_queue", f"the queue has no room for run '{run}'", self._admission.seconds_until(run, 1)
            )
        CURRENT_RUN.set(run)  # of this call's task alone
        try:
            return _response(await self._sandbox.run(job))
        except SandboxUnavailable as error:
            raise unavailable("sandbox", str(error)) from error
        finally:
            self._admission.give(run)


def read_job(request: reward_pb2.ExecuteRequest) -> Job:
    """Return the request as the sandbox's job. Raises ContractError (INVALID_ARGUMENT) naming the field."""
    if request.language not in ("", *LANGUAGES):
        raise invalid_argument("language", f"'{request.language[:40]}'", ", ".join(LANGUAGES))
    source, stdin = request.source.encode(), request.stdin.encode()
    if not 1 <= len(source) <= _LARGEST_SOURCE:
        raise invalid_argument("source", f"{len(source)} bytes", f"1 to {_LARGEST_SOURCE} bytes")
    if b"\0" in source:
        raise invalid_argument("source", "null characters", "a program without null characters")
    if len(stdin) > _LARGEST_STDIN:
        raise invalid_argument("stdin", f"{len(stdin)} bytes", f"at most {_LARGEST_STDIN} bytes")
    limits = request.limits
    wall = _seconds("limits.wall_time", limits.wall_time, limits.HasField("wall_time"), _DEFAULT_SECONDS)
    return Job(
        "script",
        source,
        stdin=stdin,
        limits=Limits(
            wall_seconds=wall,
            cpu_seconds=_seconds("limits.cpu_time", limits.cpu_time, limits.HasField("cpu_time"), wall),
            memory_bytes=_bytes("limits.memory_bytes", limits.memory_bytes, _MEMORY, _DEFAULT_MEMORY),
            output_bytes=_bytes("limits.output_bytes", limits.output_bytes, _OUTPUT, _DEFAULT_OUTPUT),
        ),
    )


def _seconds(field: str, duration: Duration, given: bool, default: float) -> float:
    seconds = to_seconds(duration) if given else default
    least, most = _SECONDS
    if not least <= seconds <= most:
        raise invalid_argument(field, f"{seconds:g} s", f"{least:g} s to {most:g} s")
    return seconds


def _bytes(field: str, value: int, allowed: tuple[int, int], default: int) -> int:
    least, most = allowed
    if value and not least <= value <= most:
        raise invalid_argument(field, value, f"{least} to {most}, or 0 for {default}")
    return value or default


def _response(execution: Execution) -> reward_pb2.ExecuteResponse:
    return reward_pb2.ExecuteResponse(
        outcome=_OUTCOMES[execution.ending],
        exit_code=execution.exit_code or 0,
        signal=execution.signal or 0,
        stdout=execution.stdout.decode(errors="replace"),
        stderr=execution.stderr.decode(errors="replace"),
        elapsed=to_duration(execution.wall_seconds),
    )
