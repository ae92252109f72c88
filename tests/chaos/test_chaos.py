"""Each group is trained exactly once under all kinds of faults, and the audit detects when it is not.

This is the short form of `make chaos` (docs/chaos.md) with its controls, runs in which one protection is omitted.
"""

import asyncio
import functools

import hangs
import pytest
import signals
from conftest import FAULTS, GROUPS, NETWORK_FAULTS, NETWORK_GROUPS, RESTORE_GROUPS, SEED
from schedule import NETWORK_DECK, POINTS, PROCESS_DECK, RESTORE_DECK, draw

SIGNALS = 5

pytestmark = pytest.mark.timeout(1000)


@pytest.mark.slow
def test_faults_of_every_kind_lose_nothing_and_train_nothing_twice(runs):
    report = runs["faults of all kinds"]
    assert report.right, report.explained()
    assert (report.done, report.verdict.audit["exactly_once"]) == (FAULTS, GROUPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("control", "found", "not_found", "event"),
    [
        ("commit without checkpoint", "lost", "twice", "refused"),  # no session begins before what is committed
        ("settle without instances", "twice", "lost", "settled"),
    ],
)
def test_a_trainer_that_leaves_a_protection_out_is_found_by_the_audit(runs, control, found, not_found, event):
    report = runs[control]
    assert not report.failure, report.explained()
    audit = report.verdict.audit
    assert audit["status"] == 1 and not audit["ok"], report.explained()
    assert audit[found] > 0 and audit[not_found] == 0 and report.events[event] > 0, report.explained()


@pytest.mark.slow
def test_redis_restored_again_and_again_loses_nothing_and_trains_nothing_twice(runs):
    report = runs["restores"]
    assert report.right, report.explained()
    assert report.verdict.audit["exactly_once"] == RESTORE_GROUPS
    assert report.faults["restore"] == 10 and report.events["settled"] > 0


@pytest.mark.slow
def test_a_cut_network_loses_nothing_and_trains_nothing_twice(runs):
    result = runs["network"]
    if "impossible" in result:
        pytest.skip(result["line"])
    assert result["right"], result["line"]
    assert f"{NETWORK_GROUPS} exactly once, 0 lost, 0 twice, 0 stuck ({NETWORK_FAULTS} of" in result["line"]


@pytest.mark.slow
def test_a_whole_run_survives_signals_to_all_of_its_processes(pythons, tmp_path):
    report = asyncio.run(signals.run(tmp_path / "run", SEED, SIGNALS, pythons, functools.partial(print, flush=True)))
    assert report.right, signals.explain(report, tmp_path / "run")


@pytest.mark.slow
def test_processes_that_hang_are_ended_by_their_deadline_and_the_others_keep_their_rate(pythons, tmp_path):
    say = functools.partial(print, flush=True)
    targets = ["reward worker", "engine"]  # with this seed in this order: no time is spent until an engine has loaded
    report = asyncio.run(hangs.run(tmp_path / "run", SEED, targets, pythons, say, seconds=5.0))
    assert report.right, signals.explain(report, tmp_path / "run")
    assert {hang.target for hang in report.hangs} == {"engine", "reward worker"}


def test_a_seed_gives_one_schedule_with_every_kind_of_fault_at_times_that_come():
    assert draw(7, 300, 20) == draw(7, 300, 20) != draw(8, 300, 20)
    for deck in (PROCESS_DECK, RESTORE_DECK, NETWORK_DECK):
        schedule = draw(1, groups=5000, faults=200, deck=deck)
        assert [fault.at for fault in schedule] == sorted(fault.at for fault in schedule)
        assert schedule[0].at >= 0 and schedule[-1].at < 5000
        assert {fault.kind for fault in schedule} == {kind for kind, _ in deck}
        assert {fault.target for fault in schedule if fault.kind == "trap"} == set(POINTS)
        assert not any("{" in fault.target for fault in schedule)
