"""Each group is trained exactly once under all kinds of faults, and the audit detects when it is not.

This is the short form of `make chaos` (docs/chaos.md) with its controls, runs in which one protection is omitted.
"""

import asyncio
import functools
import json
import os
import time

import agents
import hangs
import pytest
import signals
from conftest import FAULTS, GROUPS, NETWORK_FAULTS, NETWORK_GROUPS, RESTORE_GROUPS, SEED
from schedule import NETWORK_DECK, POINTS, PROCESS_DECK, RESTORE_DECK, draw

SIGNALS = 5
AGENTS_SEED, AGENTS_SIGNALS = 25, 4  # the engine, the environment service and a worker of it, and Redis

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


@pytest.fixture(scope="module")
def under_signals(pythons, tmp_path_factory):
    """The reports of a whole run under signals and of one of agents, at once because they mostly wait, and folders."""
    folder = tmp_path_factory.mktemp("signals")
    say = functools.partial(print, flush=True)

    async def both():
        runs = signals.run(folder / "signals", SEED, SIGNALS, pythons, say)
        return await asyncio.gather(runs, agents.run(folder / "agents", AGENTS_SEED, AGENTS_SIGNALS, pythons, say))

    of_signals, of_agents = asyncio.run(both())
    return {"signals": (of_signals, folder / "signals"), "agents": (of_agents, folder / "agents")}


@pytest.mark.slow
def test_a_whole_run_survives_signals_to_all_of_its_processes(under_signals):
    report, folder = under_signals["signals"]
    assert report.right, signals.explain(report, folder)


@pytest.mark.slow
def test_no_reward_is_made_of_an_episode_that_fails_or_whose_processes_are_killed(under_signals):
    report, folder = under_signals["agents"]
    assert report.right, signals.explain(report, folder)
    assert set(report.met) & {"block", "wait", "deaf"} and len(report.met) > 1, report.line()


def test_a_failure_that_becomes_a_reward_and_an_episode_trained_twice_are_found(tmp_path):
    (tmp_path / "run").mkdir()
    watch = agents.Watch(tmp_path / "played.jsonl")
    watch.returned = [(1, 2), (3,), (100,), (4,)]

    def compared(*groups: tuple[list[list[int]], list[float]]) -> str:
        lines = [json.dumps({"instance": str(n), "tokens": t, "rewards": r}) for n, (t, r) in enumerate(groups)]
        (tmp_path / "run" / "trained.jsonl").write_text("\n".join(lines))
        return agents.compared(tmp_path, watch, agents.AgentsReport(0, 0))

    group = [[1, 2], [3]], [4.0, 4.0]
    assert compared(group, ([[100], [4]], [4.0, 5.0])) == ""
    assert "the rewards are not those of the episodes" in compared(([[1, 2], [3]], [4.0, 0.0]))
    assert "the rewards are not those of the episodes" in compared(([[3]], [4.0]))
    assert "2 episodes were trained more often than the agent returned" in compared(group, group)
    assert "1 episodes were trained more often" in compared(([[1, 2], [5]], [4.0, 6.0]))
    assert compared() == "nothing was trained"


def test_an_episode_that_is_not_over_after_its_deadline_is_found(tmp_path):
    path = tmp_path / "played.jsonl"
    long_ago = time.time() - 2 * agents.DEADLINE_SECONDS - agents.GRACE_SECONDS
    began = [{"event": "began", "name": f"{fate}/0", "fate": fate} for fate in ("wait", "deaf")]
    lines = [{**line, "pid": os.getpid(), "began": long_ago + 1.0} for line in began]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch = agents.Watch(path)
    watch.look()
    assert "'wait' was over after 39." in watch.too_long() and "'deaf'" not in watch.too_long()
    assert set(watch.open.values()) == {"wait", "deaf"} and not watch.met


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
