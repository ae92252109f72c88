"""`quartet trace`: a group's life at the real broker, which a rollout and a trainer of ours lead it through."""

import json

import pytest
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, experience_pb2
from real_broker import echoed_group

from quartet_client.cli import main
from quartet_common.channel import connect_sync
from quartet_common.durations import to_duration

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Life:
    """The calls that take run "demo"'s only group through its life."""

    def __init__(self, address: str, run_id: str):
        self.run_id = run_id
        self.channel = connect_sync(address)
        self.stub = broker_pb2_grpc.BrokerServiceStub(self.channel)
        spec = broker_pb2.RunSpec(run_id=run_id, groups_per_step=1, max_staleness=0)
        self("CreateRun", broker_pb2.CreateRunRequest(spec=spec))
        for name, kind in (("rollout-1", common_pb2.SERVICE_KIND_ROLLOUT), ("trainer-1", 4)):
            member = broker_pb2.Member(instance_id=name, kind=kind, address="h:1", state=2)
            self("RegisterMember", broker_pb2.RegisterMemberRequest(run_id=run_id, member=member))

    def __call__(self, method: str, request):
        return getattr(self.stub, method)(request, timeout=30)

    def submit(self, name: str) -> None:
        prompt = experience_pb2.Prompt(prompt_id=name, text="1+1=?")
        instance = experience_pb2.PromptInstance(
            instance_id=name, prompt=prompt, purpose=experience_pb2.PURPOSE_TRAIN, traceparent=TRACEPARENT
        )
        self("SubmitPrompts", broker_pb2.SubmitPromptsRequest(run_id=self.run_id, instances=[instance]))

    def lease(self) -> broker_pb2.PromptLease:
        request = broker_pb2.LeasePromptsRequest(
            run_id=self.run_id, holder="rollout-1", max_prompts=1, wait=to_duration(10)
        )
        (lease,) = self("LeasePrompts", request).leases
        return lease

    def fail(self, why: str) -> None:
        release = broker_pb2.LeaseRelease(lease_id=self.lease().lease_id, failure=why)
        self("ReleaseLeases", broker_pb2.ReleaseLeasesRequest(run_id=self.run_id, releases=[release]))

    def put(self) -> None:
        lease = self.lease()
        put = broker_pb2.PutGroup(lease_id=lease.lease_id, group=echoed_group(lease))
        self("PutExperience", broker_pb2.PutExperienceRequest(run_id=self.run_id, groups=[put]))

    def train(self) -> None:
        epoch = self("OpenSession", broker_pb2.OpenSessionRequest(run_id=self.run_id, holder="trainer-1")).session_epoch
        about = {"run_id": self.run_id, "session_epoch": epoch}
        list(self.stub.LeaseExperience(broker_pb2.LeaseExperienceRequest(**about, wait=to_duration(10)), timeout=30))
        self("MarkTrained", broker_pb2.MarkTrainedRequest(**about))
        for event in (
            {"step": broker_pb2.StepFinished(step=0, policy_version=1, metrics={"reward/mean": 0.5})},
            {"weights": broker_pb2.WeightsPublished(policy_version=1, rollouts=2)},
            {"checkpoint": broker_pb2.CheckpointSaved(step=1, path="/runs/demo/checkpoints/1")},
        ):
            request = broker_pb2.ReportProgressRequest(run_id=self.run_id, event=broker_pb2.RunEvent(**event))
            self("ReportProgress", request)
        self("Commit", broker_pb2.CommitRequest(**about, step=1))


@pytest.fixture
def life(address, request):
    made = Life(address, request.node.name[:60])
    yield made
    made.channel.close()


@pytest.fixture
def trace(address, capsys, monkeypatch):
    """`quartet trace` with these arguments; returns what it printed, errors too."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str, status: int = 0) -> str:
        assert main(["trace", *arguments, f"--broker={address}"]) == status
        out, err = capsys.readouterr()
        return out + err

    return run


def test_a_committed_group_tells_its_whole_life(trace, life):
    life.submit("pass-0/17")
    life.fail("verifier failure: out of memory")
    life.put()
    life.train()
    told = json.loads(trace("pass-0/17", "--run", life.run_id, "--json"))
    assert (told["state"], told["attempt"], told["step"], told["policy_version"]) == ("committed", 2, 0, 1)
    kinds = [moment["kind"] for moment in told["moments"]]
    assert kinds[:6] == ["submitted", "leased", "returned", "leased", "put", "in_batch"]
    assert sorted(kinds[6:]) == ["committed", "durable", "published", "trained"]
    about = {moment["kind"]: moment for moment in told["moments"]}
    assert about["leased"]["who"] == about["put"]["who"] == "rollout-1"
    assert about["returned"]["detail"] == "verifier failure: out of memory"
    assert about["published"]["detail"] == "version 1 at 2 rollouts"
    completion = told["group"]["completions"][0]
    assert (completion["text"], completion["generated_after"], completion["scored_after"]) == ("1+1=?", 0.25, 0.5)

    shown = trace("pass-0/17", "--run", life.run_id)
    assert f"group pass-0/17 of run {life.run_id}: committed, delivered 2 times, step 0, carried by version 1" in shown
    assert "generated after 0.250 s, scored after 0.500 s" in " ".join(shown.split())
    assert "verifier failure: out of memory" in shown and "/runs/demo/checkpoints/1" in shown


def test_a_group_on_its_way_tells_how_far_it_is(trace, life):
    life.submit("a")
    life.lease()
    said = trace("a", "--run", life.run_id)
    assert "leased, delivered once, held by rollout-1" in said
    assert "OpenTelemetry trace 0af7651916cd43dd8448eb211c80319c" in said


def test_what_the_broker_forgot_of_a_step_stands_in_the_runs_folder(trace, life, tmp_path):
    life.submit("a")
    life.put()
    epoch = life("OpenSession", broker_pb2.OpenSessionRequest(run_id=life.run_id, holder="trainer-1")).session_epoch
    about = {"run_id": life.run_id, "session_epoch": epoch}
    list(life.stub.LeaseExperience(broker_pb2.LeaseExperienceRequest(**about, wait=to_duration(10)), timeout=30))
    life("MarkTrained", broker_pb2.MarkTrainedRequest(**about))  # and its events are lost
    row = {"kind": "step", "step": 0, "policy_version": 1, "time": 1_760_000_000.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    said = trace("a", f"--set=run.id={life.run_id}", f"--set=run.folder={tmp_path}", "--json")
    (trained,) = [moment for moment in json.loads(said)["moments"] if moment["kind"] == "trained"]
    assert trained["detail"] == "step 0 made version 1 (metrics.jsonl)" and trained["at"].startswith("2025-10-09")


def test_a_group_that_the_run_never_saw_is_an_error(trace, life):
    assert "'nobody' does not exist" in trace("nobody", "--run", life.run_id, status=2)
