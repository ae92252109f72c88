"""Execute over a real socket, in the real sandbox."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import reward_pb2
from reward_samples import until

from quartet_common.errors import ContractError, describe
from quartet_reward import metrics
from quartet_reward.queue import Admission
from quartet_reward.sandbox.api import Job
from quartet_reward.servicer import RewardServicer

TIMEOUT = 120.0


def request(source: str, **fields) -> reward_pb2.ExecuteRequest:
    return reward_pb2.ExecuteRequest(source=source, **fields)


async def execute(service, source: str, **fields) -> reward_pb2.ExecuteResponse:
    return await service.stub.Execute(request(source, **fields), timeout=TIMEOUT)


async def test_what_goes_wrong_in_a_program_is_an_outcome(service):
    short = reward_pb2.ExecutionLimits(wall_time=Duration(seconds=1))
    little = reward_pb2.ExecutionLimits(output_bytes=1000)
    alone, raised, endless, chatty, killed, odd = await asyncio.gather(
        execute(service, "import os; print(os.listdir('/tmp'))\nopen('/etc/passwd', 'w')"),
        execute(service, "print('so far')\n1 / 0"),
        execute(service, "while True: pass", limits=short),
        execute(service, "while True: print('x')", limits=little),
        execute(service, "import os; os.kill(os.getpid(), 11)"),
        execute(service, r"import sys; sys.stdout.buffer.write(b'a\xffb')"),
    )
    assert (raised.outcome, raised.exit_code) == (reward_pb2.EXECUTION_OUTCOME_EXITED, 1)
    assert raised.stdout == "so far\n" and "ZeroDivisionError" in raised.stderr
    assert alone.stdout == "[]\n" and alone.exit_code == 1
    assert endless.outcome == reward_pb2.EXECUTION_OUTCOME_TIMED_OUT
    assert chatty.outcome == reward_pb2.EXECUTION_OUTCOME_OUTPUT_EXCEEDED and 0 < len(chatty.stdout) <= 1000
    assert (killed.outcome, killed.signal) == (reward_pb2.EXECUTION_OUTCOME_SIGNALLED, 11)
    assert odd.stdout == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize(
    ("one", "field", "allowed"),
    [
        (request("x" * ((1 << 20) + 1)), "source", "1 to 1048576 bytes"),
        (request("1", limits={"wall_time": Duration(seconds=601)}), "limits.wall_time", "0.1 s to 600 s"),
        (request("1", limits={"output_bytes": -1}), "limits.output_bytes", "1 to 16777216"),
    ],
)
async def test_bad_requests_are_refused_by_field(service, one, field, allowed):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.stub.Execute(one, timeout=TIMEOUT)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert describe(caught.value).startswith(field + ":") and allowed in describe(caught.value)


class Held:
    """A sandbox in which every program runs until it is cancelled."""

    mode = "held"

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.killed = asyncio.Event()

    async def run(self, job: Job):
        self.started.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.killed.set()


async def test_a_full_queue_says_when_to_come_again_and_a_cancelled_call_frees_its_place():
    admission, sandbox = Admission(2), Held()  # of two places a run alone may hold one
    servicer = RewardServicer(None, {}, admission, sandbox)
    first = asyncio.create_task(servicer.Execute(request("1", run_id="demo"), None))
    await asyncio.wait_for(sandbox.started.wait(), TIMEOUT)
    with pytest.raises(ContractError) as caught:
        await servicer.Execute(request("1", run_id="demo"), None)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED and len(caught.value.details) == 2
    first.cancel()
    await asyncio.wait({first})
    assert sandbox.killed.is_set() and admission.free == 2


async def test_a_call_that_is_cancelled_kills_its_program(service):
    # The four slots are taken by programs that would run for minutes.
    minutes = reward_pb2.ExecutionLimits(wall_time=Duration(seconds=300))
    calls = [service.stub.Execute(request("while True: pass", limits=minutes)) for _ in range(4)]
    running = metrics.QUEUE_DEPTH.labels("code", "running")
    await until(lambda: running._value.get() == 4, TIMEOUT)
    with pytest.raises(grpc.aio.AioRpcError):  # no slot is left for it
        await service.stub.Execute(request("print(1)"), timeout=2.0)
    for call in calls:
        call.cancel()
    assert (await execute(service, "print(1)")).stdout == "1\n"
