"""Whose time is up: the program's, the test's, or the machine's, which is no outcome."""

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from quartet.v1 import reward_pb2
from reward_samples import judged, program

from quartet_reward import metrics
from quartet_reward.sandbox import run

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPIN = """
import time

def spin(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds: pass

"""
LIMITS = "bad_reference, give up: the test exceeded its limits"
SQUARE = "def f(n): return n * n"
CHECK = "assert f(2) == 4"
CASES = [("[2]", "4"), ("[3]", "9")]


async def outcome_of(sandbox, source: str, seconds: float = 1.0, **reference) -> str:
    """The name of the outcome, or of the failure and whether it is retryable."""
    found = await judged(sandbox, program(source, **reference), timeout_seconds=seconds)
    if found.HasField("failure"):
        retry = "retry" if found.failure.retryable else "give up"
        return f"{metrics.failure_name(found.failure.kind)}, {retry}: {found.failure.message}"
    return metrics.outcome_name(found.score.outcome)


@pytest.mark.parametrize(
    ("source", "test", "outcome"),
    [
        # Together they take more than either may take.
        (f"{SPIN}spin(0.7)\n{SQUARE}", f"{SPIN}spin(1.5)\n{CHECK}", "correct"),
        (f"{SPIN}{SQUARE}", f"{SPIN}{CHECK}\nspin(1.5)\n{CHECK}", "correct"),
        (f"{SPIN}spin(0.7)\n{SQUARE}", f"{SPIN}spin(9)\n{CHECK}", LIMITS),
        (SQUARE, f"import time\ntime.sleep(30)\n{CHECK}", LIMITS),
        (f"{SPIN}spin(9)\n{SQUARE}", f"{SPIN}spin(0.7)\n{CHECK}", "timed_out"),
        (f"import time\ntime.sleep(30)\n{SQUARE}", CHECK, "timed_out"),
        (f"{SPIN}def f(n): spin(9)", f"{SPIN}spin(0.7)\n{CHECK}", "timed_out"),
    ],
)  # fmt: skip
async def test_test_and_program_have_time_of_their_own(sandbox, source, test, outcome):
    assert (await outcome_of(sandbox, source, test_program=test)).startswith(outcome)


STYLES = {
    "assertions": ("def f(n):\n    time.sleep({})\n    return n * n", {"test_program": CHECK}),
    "cases": ("def f(n):\n    time.sleep({})\n    return n * n", {"cases": CASES, "entry_point": "f"}),
    "output": ("time.sleep({})\nprint(int(input()) ** 2)", {"cases": [("2", "4")]}),
}


@pytest.fixture
def busy(monkeypatch) -> Callable[[float], None]:
    """Makes a machine on which every process waits for a processor this share of its time."""

    def make(share: float) -> None:
        usage, began = run.tree_usage, time.monotonic()

        def waiting(roots, idle, base_bytes):
            return replace(usage(roots, idle, base_bytes), waited_seconds=share * (time.monotonic() - began))

        monkeypatch.setattr(run, "tree_usage", waiting)

    return make


@pytest.mark.parametrize("style", STYLES)
async def test_a_program_that_waits_for_a_processor_is_not_late(sandbox, busy, style):
    slow, reference = STYLES[style]
    source = "import time\n" + slow.format(2.5)
    assert await outcome_of(sandbox, source, **reference) == "timed_out"
    busy(0.9)
    assert await outcome_of(sandbox, source, **reference) == "correct"


@pytest.mark.parametrize("style", STYLES)
async def test_what_may_be_the_machines_fault_is_tried_again(sandbox, busy, style):
    busy(1.0)
    slow, reference = STYLES[style]
    outcome = await outcome_of(sandbox, "import time\n" + slow.format(60), 0.4, **reference)
    assert outcome.startswith("sandbox_unavailable, retry: this machine is too busy"), outcome


async def test_a_test_that_waits_for_a_processor_is_no_bad_reference(sandbox, busy):
    busy(0.9)
    test = f"import time\ntime.sleep(4)\n{CHECK}"
    assert await outcome_of(sandbox, SQUARE, test_program=test) == "correct"


async def test_a_long_message_before_the_first_call_does_not_use_up_the_tests_time(sandbox):
    padded = (
        "import sys\nrpc = sys.modules['quartet_reward.code.rpc']\nnodes = rpc.Encoder.nodes\n"
        "def padded(self):\n    return nodes(self) + [['list', [['tuple', 1]] * 600000]]\n"
        f"rpc.Encoder.nodes = padded\n{SPIN}{SQUARE}"
    )
    found = await judged(
        sandbox, program(padded, test_program=f"{SPIN}spin(1.6)\n{CHECK}"), timeout_seconds=1.0, memory_bytes=1 << 30
    )
    assert found.HasField("score") and found.score.outcome != reward_pb2.OUTCOME_CORRECT, found


async def test_threads_that_wait_for_each_other_use_up_their_processor_time(sandbox):
    source = "import threading\ndef f():\n    while True: pass\nfor _ in range(12): threading.Thread(target=f).start()"
    found = await judged(sandbox, program(source, cases=[("", "1")]), timeout_seconds=1.0)
    assert found.score.outcome == reward_pb2.OUTCOME_TIMED_OUT, found
