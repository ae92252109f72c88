"""The short form of the attacks of `make fuzz` (run.py); latencies are bounded, but not compared with those before."""

import asyncio
from pathlib import Path

import pytest
import run
from attacks import ATTACKS

ATTACK_SECONDS, QUIET_SECONDS = 6.0, 1.0

pytestmark = pytest.mark.timeout(380)


@pytest.mark.slow
def test_attacks_on_a_live_run_are_answered_by_whose_fault_they_are_and_harm_nobody_else(tmp_path: Path):
    report = asyncio.run(run.attack(tmp_path, ATTACK_SECONDS, QUIET_SECONDS, seed=1))
    assert not report.judge(timed=False), report.tables()


def test_no_attack_may_be_answered_as_a_fault_of_the_service():
    assert not {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED"} & set().union(*(a.allowed for a in ATTACKS))
