"""A rollback with all four services: training goes on from earlier weights, and every group still counts once."""

import json
from pathlib import Path

import pytest
from by_hand import SERVICES, ByHand

from quartet_client import Client

pytestmark = pytest.mark.timeout(300)
RUN, EVERY = "by-hand", 4


def quartet(services: ByHand, *words: str, status: int = 0) -> str:
    """Run a `quartet` command with the run file, and return what it said."""
    command = services._start
    command(words[0], [services.pythons["client"], "-m", "quartet_client", *words, "--config", *services.arguments])
    asked = services.processes.pop(words[0])
    assert asked.wait(60) == status, asked.said() + services.logs()
    return asked.said()


def kept(root: Path) -> dict[int, Path]:
    return {int(path.name[5:]): path for path in sorted(root.glob("step-*"))}


def state_of(checkpoint: Path) -> dict[str, bytes]:
    """The bytes of the weights and of AdamW's state."""
    return {path.name: path.read_bytes() for path in checkpoint.rglob("*.safetensors")}


def test_a_run_rolled_back_trains_on_from_the_earlier_weights_and_each_group_counts_once(by_hand, tmp_path):
    services: ByHand = by_hand(
        run__max_steps=100_000,
        run__max_staleness=1,
        data__passes=0,
        trainer__learning_rate=1e-2,
        trainer__skip_zero_advantage="false",
        trainer__evaluation__interval=0,
        trainer__checkpoint__interval=EVERY,
        trainer__checkpoint__keep_last=2,
    )
    root = tmp_path / "run" / "checkpoints"
    services.start_redis()
    for name in SERVICES:
        services.start(name)
    services.client("run", "--attach", "--plain", *services.arguments)
    services.wait_for("client", "\nstep 12/")
    refused = quartet(services, "rollback", RUN, "--to", "8", status=2)
    assert f"'{root}' is in use by another trainer" in refused and "stop that one" in refused

    stopped = quartet(services, "stop", RUN)
    assert services.processes["trainer"].wait(60) == 0, services.logs()
    before, newest = kept(root), max(kept(root))
    assert f"{newest} steps are committed" in stopped and newest >= 12
    to = max(step for step in before if step < newest)
    weights = state_of(before[to])
    assert weights != state_of(before[newest]) and weights.keys() == state_of(before[newest]).keys()
    with Client(services.addresses["broker"]) as client:

        def is_left() -> bool:  # ready, or leased by the session that has ended
            stats = client.get_run(RUN).stats
            return stats.ready + stats.leased_to_trainer > 0

        services.wait_until("rollout", is_left, "it fills the queue with the bad weights")
        run = client.get_run(RUN)
        assert run.policy_version == newest
        stale = run.stats.stale + run.stats.ready  # a batch that the ended session had leased is requeued instead

    refused = quartet(services, "rollback", RUN, "--to", "2", status=2)
    assert f"allowed: the steps of the earlier ones, {to}" in refused
    said = quartet(services, "rollback", RUN, "--to", str(to))
    version = newest + 2  # no group of version `newest` or below is fresh enough for it
    assert f"run {RUN} goes on at step {version} with the weights of step {to}" in said
    assert state_of(kept(root)[version]) == weights

    services.start("trainer")
    services.wait_for("client", f"\nstep {version + EVERY + 1}/")
    quartet(services, "stop", RUN)
    assert services.processes["trainer"].wait(60) == 0, services.logs()
    rows = services.rows("step")
    done = [row["step"] for row in rows]
    assert done == [*range(newest), *range(version, version + len(done) - newest)]
    after = [row for row in rows if row["step"] >= version]
    # Only groups of the weights that were sent after the rollback were trained, and both sides agree on these weights.
    assert after[0]["staleness/max"] == 0 and all(row["staleness/max"] <= 1 for row in after)
    assert after[0]["mismatch/log_prob_diff_max"] < 1e-3, after[0]
    with Client(services.addresses["broker"]) as client:
        run = client.get_run(RUN)
        assert run.stats.stale >= stale and run.policy_version == run.committed_step == max(done) + 1
    ledger = [json.loads(line) for line in (root / "ledger.jsonl").read_text().splitlines()]
    assert [line["step"] for line in ledger if not line["instances"]] == [newest, newest + 1]
    names = [name for line in ledger for name in line["instances"]]
    assert len(names) == len(set(names)) == 4 * len(done)
    assert f"{len(names)} exactly once, 0 lost, 0 twice, 0 stuck" in quartet(services, "audit", RUN)
