"""Large outputs and tasks are encoded and compared off the event loop: it serves others meanwhile."""

import asyncio
import json
import threading

import pytest
from quartet.v1 import reward_pb2
from reward_samples import judged, program

from quartet_reward.code.judged import encoded
from quartet_reward.sandbox.api import Execution, ExitReason, Job
from quartet_reward.servicer import RewardServicer
from quartet_server.fair_queue import Admission

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECONDS = 60.0
LARGE = 64 << 20
PRINTS = f"import os\npart = b'x' * (1 << 16)\nfor _ in range({LARGE >> 16}):\n    os.write(1, part)"


class Gate:
    """Holds a thread until the event loop has opened the gate: on the event loop itself it would never open."""

    def __init__(self) -> None:
        self._reached, self._open = threading.Event(), threading.Event()

    def wait(self) -> None:
        self._reached.set()
        assert self._open.wait(SECONDS), "the event loop is held up"

    async def open(self) -> None:
        async with asyncio.timeout(SECONDS):
            while not self._reached.is_set():
                await asyncio.sleep(0.01)
        self._open.set()


class Printed(bytearray):
    """An output that is decoded only when the event loop has opened the gate."""

    def __init__(self, gate: Gate):
        super().__init__(b"printed")
        self._gate = gate

    def decode(self, *arguments, **named):
        self._gate.wait()
        return super().decode(*arguments, **named)


class Ran:
    """A sandbox whose programs have ended like this; it remembers the jobs."""

    def __init__(self, *executions: Execution):
        self.executions = list(executions)
        self.jobs: list[Job] = []

    async def run(self, job: Job) -> Execution:
        self.jobs.append(job)
        return self.executions.pop(0)


def execution(stdout: bytes | bytearray, report: bytes = b"") -> Execution:
    return Execution(ExitReason.EXITED, 0, None, stdout, b"", report, 0.1, 0.1)


async def test_an_executed_programs_output_is_decoded_in_a_thread():
    gate = Gate()
    servicer = RewardServicer(None, {}, Admission(2), Ran(execution(Printed(gate))))
    call = asyncio.create_task(servicer.Execute(reward_pb2.ExecuteRequest(source="1"), None))
    await gate.open()
    assert (await call).stdout == "printed"


@pytest.mark.parametrize("checker", ["", "def check(i, output, e): return True"])
async def test_a_large_output_goes_to_the_sandbox_as_it_is(checker):
    output = bytearray(LARGE)
    passed = b'{"finding": "passed", "reason": ""}\n'
    sandbox = Ran(execution(output), execution(b"", passed))
    found = await judged(sandbox, program("1", cases=[("1", "2")]), output_bytes=LARGE, checker=checker)
    assert found.score.outcome == reward_pb2.OUTCOME_CORRECT
    assert sandbox.jobs[1].entry == "judge" and sandbox.jobs[1].stdin is output
    assert len(sandbox.jobs[1].payload) < 1000


async def test_a_large_task_is_encoded_in_a_thread(monkeypatch):
    gate, task = Gate(), {"cases": [("é" * 100_000, "\ud800")], "tolerance": 0.0}
    iterencode = json.JSONEncoder.iterencode

    def gated(self, value, _one_shot=False):
        if not _one_shot:
            gate.wait()
        return iterencode(self, value, _one_shot)

    monkeypatch.setattr(json.JSONEncoder, "iterencode", gated)
    call = asyncio.create_task(encoded(task))
    await gate.open()
    assert json.loads(await call) == {"cases": [["é" * 100_000, "\ud800"]], "tolerance": 0.0}


ANY_LENGTH = f"def check(i, output, e): return e == output or len(output) == {LARGE}"


@pytest.mark.parametrize(
    ("parameters", "expected", "outcome"),
    [
        ({}, "x", reward_pb2.OUTCOME_INCORRECT),
        ({"compare": "tokens"}, "x" * (1 << 17), reward_pb2.OUTCOME_INCORRECT),
        ({"checker": ANY_LENGTH}, "x", reward_pb2.OUTCOME_CORRECT),
        ({"checker": "def check(i, output, e): return e == output"}, "x", reward_pb2.OUTCOME_INCORRECT),
    ],
)
async def test_64_mib_are_judged(sandbox, parameters, expected, outcome):
    one = program(PRINTS, cases=[("1", expected)])
    found = await judged(sandbox, one, output_bytes=LARGE, memory_bytes=128 << 20, **parameters)
    assert found.score.outcome == outcome, found


async def test_long_outputs_are_compared_as_short_ones_are(sandbox):
    lines = "\n".join(f"{number} " for number in range(20_000))
    for printed, outcome in ((lines, reward_pb2.OUTCOME_CORRECT), (lines[1:], reward_pb2.OUTCOME_INCORRECT)):
        found = await judged(sandbox, program(f"print({printed!r})", cases=[("", lines + "\n")]))
        assert found.score.outcome == outcome, found
