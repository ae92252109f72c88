"""The audit: each way in which a group can be lost, repeated or left behind is found, and a right run is right."""

import asyncio
import dataclasses
import json

import pytest
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import common_pb2, experience_pb2

from quartet_client import AsyncClient
from quartet_client.audit import AuditReport, Books, Checkpoint, Place, audit
from quartet_client.cli import main
from quartet_common.ledger import Ledger

STATES = ("queued", "leased", "ready", "leased_to_trainer")


def committed(steps: int, per_step: int = 2) -> dict[str, Place]:
    return {f"pass-0/{n}": Place("committed", n // per_step) for n in range(steps * per_step)}


def ledger(steps: int, per_step: int = 2) -> Checkpoint:
    lines = [(step, [f"pass-0/{step * per_step + n}" for n in range(per_step)]) for step in range(steps)]
    return Checkpoint(steps, lines)


def books(places: dict[str, Place], **fields) -> Books:
    given = {"state": "succeeded", "prompts_ended": True, "policy_version": 3, "committed_step": 3} | fields
    return Books("demo", places=places, **given)


def counts(report: AuditReport) -> dict[str, int]:
    """Those that are not 0."""
    fields = dataclasses.asdict(report)
    return {
        name: fields[name]
        for name in fields
        if name not in ("run_id", "checkpoint_step", "over", "faults") and fields[name]
    }


def test_a_run_that_is_right():
    report = audit(books(committed(3)), ledger(3))
    assert report.ok and counts(report) == {"exactly_once": 6} and report.faults == ()
    assert report.sentence() == "run demo: 6 exactly once, 0 lost, 0 twice, 0 stuck"


def test_dropped_and_dead_ones_are_counted_and_no_fault():
    report = audit(books({**committed(3), "d": Place("dropped", 1), "x": Place("dead")}), ledger(3))
    assert report.ok and counts(report) == {"exactly_once": 6, "dropped": 1, "dead": 1}
    assert report.sentence().endswith("0 stuck, 1 dropped, 1 dead")


def test_committed_at_the_broker_and_in_no_weights_is_lost():
    report = audit(books({**committed(3), "gone": Place("committed", 2)}), ledger(3))
    assert not report.ok and counts(report) == {"exactly_once": 6, "lost": 1}
    assert report.faults == ("gone is lost: committed by step 2 at the broker, but in no weights",)


def test_trained_before_the_checkpoint_and_not_in_it_is_lost():
    report = audit(books({**committed(3), "gone": Place("trained", 1)}, state="active"), ledger(3))
    assert counts(report) == {"exactly_once": 6, "lost": 1}


def test_without_any_checkpoint_all_that_is_committed_is_lost():
    report = audit(books(committed(3)), Checkpoint())
    assert counts(report) == {"lost": 6} and not report.ok


def test_in_two_steps_or_two_times_in_one_is_twice():
    steps = Checkpoint(3, [(0, ["a", "b"]), (1, ["a", "c"]), (2, ["d", "d"])])
    places = {
        "a": Place("committed", 0),
        "b": Place("committed", 0),
        "c": Place("committed", 1),
        "d": Place("committed", 2),
    }
    report = audit(books(places), steps)
    assert counts(report) == {"exactly_once": 2, "twice": 2} and not report.ok
    assert report.faults == ("a was trained twice, by steps 0, 1", "d was trained twice, by steps 2, 2")


@pytest.mark.parametrize("state", STATES)
def test_what_is_left_behind_when_the_data_ended_the_run_is_stuck(state):
    report = audit(books({**committed(3), "left": Place(state)}), ledger(3))
    assert counts(report) == {"exactly_once": 6, "stuck": 1} and not report.ok
    assert "left is stuck" in report.faults[0]


@pytest.mark.parametrize("fields", [{"max_steps": 3}, {"state": "cancelled"}, {"state": "failed"}, {"state": "active"}])
@pytest.mark.parametrize("state", STATES)
def test_what_is_left_behind_in_a_run_that_ended_otherwise_or_goes_on_is_not(state, fields):
    report = audit(books({**committed(3), "left": Place(state)}, **fields), ledger(3))
    assert counts(report) == {"exactly_once": 6, "waiting": 1} and report.ok
    goes_on = fields.get("state") == "active"
    assert report.over is not goes_on
    assert report.sentence().endswith("0 stuck, 1 waiting" if goes_on else "0 stuck, 1 left over")


@pytest.mark.parametrize("ending", ["max_steps", "early_stop", "requested", "dead_prompts", "a newer one"])
@pytest.mark.parametrize("state", STATES)
def test_only_a_run_that_its_data_ended_leaves_nothing_behind(state, ending):
    left = {**committed(3), "left": Place(state)}
    report = audit(books(left, ending=ending), ledger(3))
    assert report.ok and counts(report) == {"exactly_once": 6, "waiting": 1}
    for outcome in ("succeeded", "failed"):
        report = audit(books(left, ending="data", state=outcome, max_steps=3), ledger(3))
        assert counts(report) == {"exactly_once": 6, "stuck": 1}, "whatever the run came to"


def test_trained_but_in_no_checkpoint_is_stuck_only_when_the_run_succeeded():
    places = {**committed(3), "t": Place("trained", 3)}
    fields = {"policy_version": 4, "max_steps": 4}
    assert counts(audit(books(places, **fields), ledger(3))) == {"exactly_once": 6, "stuck": 1}
    assert counts(audit(books(places, **fields, state="active"), ledger(3))) == {"exactly_once": 6, "waiting": 1}


def test_a_checkpoint_that_the_broker_has_not_heard_of_yet_is_no_fault():
    places = {**committed(2), "pass-0/4": Place("trained", 2), "pass-0/5": Place("trained", 2)}
    report = audit(books(places, state="active", committed_step=2), ledger(3))
    assert report.ok and counts(report) == {"exactly_once": 6}


def test_what_was_trained_since_the_broker_was_asked_is_no_fault_while_the_run_goes_on():
    places = {**committed(2), "pass-0/4": Place("leased_to_trainer", 2)}  # pass-0/5 was not even submitted
    report = audit(books(places, state="active", policy_version=2, committed_step=2), ledger(3))
    assert report.ok and counts(report) == {"exactly_once": 6}
    report = audit(books(places, policy_version=2, committed_step=2), ledger(3))
    assert not report.ok and report.exactly_once == 4, "a finished run changes no more"


@pytest.mark.parametrize(
    "place", [*map(Place, STATES), Place("dropped", 1), Place("dead"), Place("committed", 0), Place("trained", 1)]
)
def test_in_the_weights_but_elsewhere_at_the_broker_is_a_fault(place):
    report = audit(books({**committed(3), "pass-0/4": place}, state="active"), ledger(3))
    assert not report.ok and report.exactly_once == 5
    assert "pass-0/4 is in the weights by step 2, but " in report.faults[0]


def test_what_a_checkpoint_told_the_broker_is_of_no_step_there():
    report = audit(books({**committed(3), "pass-0/2": Place("committed", -1)}), ledger(3))
    assert report.ok and report.exactly_once == 6


def test_forgotten_ones_are_taken_for_what_the_ledger_says_but_no_more_than_were_forgotten():
    places = {name: place for name, place in committed(3).items() if place.step > 0}
    report = audit(books(places, forgotten=2), ledger(3))
    assert report.ok and counts(report) == {"exactly_once": 6, "forgotten": 2}
    report = audit(books(places, forgotten=1), ledger(3))
    assert not report.ok and report.exactly_once == 5
    assert report.faults[0].startswith("2 instances are in the weights, but the broker does not know them")


@pytest.mark.parametrize("lines", [[0, 1], [0, 2], [1, 2, 3], [0, 1, 2, 3]])
def test_a_ledger_that_lacks_a_step_is_a_fault(lines):
    report = audit(
        books({f"a{step}": Place("committed", step) for step in lines}), Checkpoint(3, [(n, [f"a{n}"]) for n in lines])
    )
    assert not report.ok and "does not tell all that was trained" in report.faults[0]


def test_the_brokers_own_faults_are_told():
    report = audit(books(committed(3), faults=("queued: the broker counts 1, there are 0",)), ledger(3))
    assert not report.ok and report.faults == ("queued: the broker counts 1, there are 0",)


def test_many_faults_of_a_kind_are_summed_up():
    report = audit(books({f"gone/{n}": Place("committed", 0) for n in range(50)}), Checkpoint())
    assert report.lost == 50 and len(report.faults) == 11 and report.faults[-1] == "and 40 more of these"


# The command, on a real broker ----------------------------------------------------------------------------------------


class Trained:
    """A run at a real broker, two steps of which are trained and in a checkpoint by hand."""

    def __init__(self, address: str, run_id: str, root):
        self.address, self.run_id, self.root = address, run_id, root
        self.ledger = Ledger(root / "ledger.jsonl")

    async def train(self) -> None:
        async with AsyncClient(self.address) as client:
            stub = await client.connections.stub("broker")
            spec = pb.RunSpec(run_id=self.run_id, groups_per_step=2, max_staleness=8)
            self.run = (await stub.CreateRun(pb.CreateRunRequest(spec=spec))).run
            member = pb.Member(instance_id="r", kind=common_pb2.SERVICE_KIND_ROLLOUT, address="127.0.0.1:1")
            await stub.RegisterMember(pb.RegisterMemberRequest(run_id=self.run_id, member=member))
            train = [{"prompt": str(n)} for n in range(4)]
            await client.submit(self.run_id, train, purpose="train", instance_ids=[f"pass-0/{n}" for n in range(4)])
            asked = pb.LeasePromptsRequest(run_id=self.run_id, holder="r", max_prompts=4)
            puts = []
            for lease in (await stub.LeasePrompts(asked)).leases:
                header = experience_pb2.GroupHeader(
                    instance_id=lease.instance.instance_id, purpose=experience_pb2.PURPOSE_TRAIN, completions=1
                )
                group = experience_pb2.ExperienceGroup(header=header, tensors=b"t", transcript=b"")
                puts.append(pb.PutGroup(lease_id=lease.lease_id, group=group))
            await stub.PutExperience(pb.PutExperienceRequest(run_id=self.run_id, groups=puts))
            opened = await stub.OpenSession(pb.OpenSessionRequest(run_id=self.run_id, holder="t"))
            session = {"run_id": self.run_id, "session_epoch": opened.session_epoch}
            for step in range(2):
                parts = [part async for part in stub.LeaseExperience(pb.LeaseExperienceRequest(step=step, **session))]
                await stub.MarkTrained(pb.MarkTrainedRequest(step=step, **session))
                self.ledger.append(step, list(parts[0].manifest.instance_ids))
            self.checkpoint(2)
            await stub.Commit(pb.CommitRequest(step=2, **session))
            await stub.EndPrompts(pb.EndPromptsRequest(run_id=self.run_id))
            await stub.FinishRun(pb.FinishRunRequest(run_id=self.run_id, state=pb.RUN_STATE_SUCCEEDED))

    def checkpoint(self, step: int, **facts) -> None:
        folder = self.root / f"step-{step:08d}"
        folder.mkdir(parents=True)
        manifest = {
            "step": step,
            "run_id": self.run_id,
            "run_created_at": self.run.created_at.ToJsonString(),
            "ledger": self.ledger.mark(),
            "files": {},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest | facts))


@pytest.fixture
def trained(address, tmp_path, request):

    name = f"run-{abs(hash(request.node.name)) % 10**9}"
    run = Trained(address, name, tmp_path / "checkpoints")
    asyncio.run(run.train())
    return run


def _audit(capsys, run: Trained, *options: str) -> tuple[int, str, str]:
    status = main(["audit", run.run_id, "--broker", run.address, "--checkpoints", str(run.root), *options])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_right_run_is_one_line_and_status_0(trained, capsys):
    said = f"run {trained.run_id}: 4 exactly once, 0 lost, 0 twice, 0 stuck\n"
    assert _audit(capsys, trained) == (0, said, "")
    status, out, _ = _audit(capsys, trained, "--json")
    report = json.loads(out)
    assert status == 0 and report["ok"] is True and report["exactly_once"] == 4 and report["checkpoint_step"] == 2
    keys = {"exactly_once", "lost", "twice", "stuck", "dropped", "dead", "waiting", "forgotten", "over", "faults", "ok"}
    assert keys <= report.keys() and report["faults"] == []


def test_a_lost_checkpoint_is_told_with_status_1(trained, capsys):
    (trained.root / "step-00000002" / "manifest.json").unlink()
    status, out, _ = _audit(capsys, trained)
    assert status == 1
    assert "0 exactly once, 4 lost" in out and "2 steps are committed, but the newest complete checkpoint in" in out


def test_books_that_end_before_the_checkpoint_are_told_with_status_1(trained, capsys):
    """Redis was restored from an earlier state, and nothing runs."""
    trained.ledger.append(2, ["pass-0/4", "pass-0/5"])
    trained.checkpoint(3)
    status, out, _ = _audit(capsys, trained)
    assert status == 1 and "books at step 2, checkpoint at step 3: Redis was restored from an earlier state" in out


def test_a_ledger_that_was_changed_is_told_with_status_1(trained, capsys):
    path = trained.root / "ledger.jsonl"
    path.write_text(path.read_text().replace("pass-0/1", "pass-0/9"))
    status, out, _ = _audit(capsys, trained)
    assert status == 1 and "the newest checkpoint's ledger cannot be used" in out and "have the checksum" in out


def test_another_runs_checkpoints_are_refused_with_status_2(trained, capsys):
    trained.checkpoint(3, run_id="another")
    status, _, err = _audit(capsys, trained)
    assert status == 2 and "is of run 'another'" in err and "--checkpoints" in err


def test_a_checkpoint_without_ledger_is_refused_with_status_2(trained, capsys):
    trained.checkpoint(3, ledger=None)
    status, _, err = _audit(capsys, trained)
    assert status == 2 and "has no ledger" in err


def test_a_deleted_run_is_said_to_be(trained, capsys):
    assert main(["runs", "delete", trained.run_id, "--broker", trained.address]) == 0
    capsys.readouterr()
    status, out, _ = _audit(capsys, trained)
    assert status == 1 and "it was deleted, or never made; only the ledger was looked at" in out


def test_the_checkpoints_are_found_by_the_run_file(trained, capsys, write):
    file = write("run.toml", f"[run]\nid = '{trained.run_id}'\n[trainer.checkpoint]\nfolder = '{trained.root}'\n")
    options = ["--broker", trained.address, "--config", str(file)]
    assert main(["audit", trained.run_id, *options]) == 0
    file.write_text(
        f"[run]\nid = '{trained.run_id}'\nfolder = '{trained.root.parent}'\n[trainer]\nalgorithm = 'dapo'\n"
    )
    assert main(["audit", trained.run_id, *options]) == 0
    assert capsys.readouterr().out.count("4 exactly once") == 2


def test_a_broker_that_is_away_is_status_2(nowhere, tmp_path, capsys):
    assert main(["audit", "demo", "--broker", nowhere, "--checkpoints", str(tmp_path)]) == 2
    assert "nothing listens there" in capsys.readouterr().err
