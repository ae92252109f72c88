"""`quartet trace`: a group's life at the real broker, which a rollout and a trainer of ours lead it through."""

import json

import pytest
from quartet.v1 import broker_pb2 as pb
from real_broker import Life

from quartet_client.cli.main import main
from quartet_contract.world import instance

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def life(address):
    return Life(address, "demo", groups_per_step=1)


@pytest.fixture
def trace(address, capsys, monkeypatch):
    """`quartet trace` with these arguments; returns what it printed, errors too."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["trace", *arguments, f"--broker={address}"]) == status
        return "".join(capsys.readouterr())

    return run


def test_a_committed_group_tells_its_whole_life(trace, life):
    queued = instance("pass-0/17", traceparent=TRACEPARENT)
    life.call("SubmitPrompts", pb.SubmitPromptsRequest(run_id="demo", instances=[queued]))
    (lease,) = life.lease()
    said = trace("pass-0/17", "--run", "demo")
    assert "leased, delivered once, held by r1" in said
    assert "OpenTelemetry trace 0af7651916cd43dd8448eb211c80319c" in said
    release = pb.LeaseRelease(lease_id=lease.lease_id, failure="verifier failure: out of memory")
    life.call("ReleaseLeases", pb.ReleaseLeasesRequest(run_id="demo", releases=[release]))
    life.answer()
    life.train()
    life.report(step=pb.StepFinished(step=0, policy_version=1, metrics={"reward/mean": 0.5}))
    life.report(weights=pb.WeightsPublished(policy_version=1, rollouts=2))
    life.report(checkpoint=pb.CheckpointSaved(step=1, path="/runs/demo/checkpoints/1"))
    life.commit(1)
    told = json.loads(trace("pass-0/17", "--run", "demo", "--json"))
    assert (told["state"], told["attempt"], told["step"], told["policy_version"]) == ("committed", 2, 0, 1)
    kinds = [moment["kind"] for moment in told["moments"]]
    assert kinds[:6] == ["submitted", "leased", "returned", "leased", "put", "in_batch"]
    assert sorted(kinds[6:]) == ["committed", "durable", "published", "trained"]
    about = {moment["kind"]: moment for moment in told["moments"]}
    assert about["leased"]["who"] == about["put"]["who"] == "r1"
    assert about["returned"]["detail"] == "verifier failure: out of memory"
    assert about["published"]["detail"] == "version 1 at 2 rollouts"
    completion = told["group"]["completions"][0]
    assert (completion["text"], completion["generated_after"], completion["scored_after"]) == ("1+1=?", 0.25, 0.5)

    shown = trace("pass-0/17", "--run", "demo")
    assert "group pass-0/17 of run demo: committed, delivered 2 times, step 0, carried by version 1" in shown
    assert "generated after 0.250 s, scored after 0.500 s" in " ".join(shown.split())
    assert "verifier failure: out of memory" in shown and "/runs/demo/checkpoints/1" in shown
    assert "'nobody' does not exist" in trace("nobody", "--run", "demo", status=2)


def test_what_the_broker_forgot_of_a_step_stands_in_the_runs_folder(trace, life, tmp_path):
    life.submit("a")
    life.answer()
    life.train()  # and its events are lost
    row = {"kind": "step", "step": 0, "policy_version": 1, "time": 1_760_000_000.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    said = trace("a", "--set=run.id=demo", f"--set=run.folder={tmp_path}", "--json")
    (trained,) = [moment for moment in json.loads(said)["moments"] if moment["kind"] == "trained"]
    assert trained["detail"] == "step 0 made version 1 (metrics.jsonl)" and trained["at"].startswith("2025-10-09")
