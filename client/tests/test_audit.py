"""The audit: each way in which a group can be lost, repeated or left behind is found, and a right run is right."""

import dataclasses
import json
from pathlib import Path

import pytest
from real_broker import Life

from quartet_client.audit import AuditReport, Books, CheckpointLedger, Place, audit
from quartet_client.cli.main import main
from quartet_common.ledger import Ledger

STATES = ("queued", "leased", "ready", "leased_to_trainer")


def committed(steps: int, per_step: int = 2) -> dict[str, Place]:
    return {f"pass-0/{n}": Place("committed", n // per_step) for n in range(steps * per_step)}


def ledger(steps: int, per_step: int = 2) -> CheckpointLedger:
    lines = [(step, [f"pass-0/{step * per_step + n}" for n in range(per_step)]) for step in range(steps)]
    return CheckpointLedger(steps, lines)


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


RIGHT = committed(3)
LATER = {name: place for name, place in RIGHT.items() if place.step > 0}
FOUR = {"policy_version": 4, "max_steps": 4}
BEHIND = {"state": "active", "policy_version": 2, "committed_step": 2}
TWICE = CheckpointLedger(3, [(0, ["a", "b"]), (1, ["a", "c"]), (2, ["d", "d"])])
OF_TWICE = {name: Place("committed", step) for name, step in {"a": 0, "b": 0, "c": 1, "d": 2}.items()}


@pytest.mark.parametrize(
    ("places", "fields", "found"),
    [
        (RIGHT, {}, {"exactly_once": 6}),
        (RIGHT | {"d": Place("dropped", 1)}, {}, {"exactly_once": 6, "dropped": 1}),
        (RIGHT | {"x": Place("dead")}, {}, {"exactly_once": 6, "dead": 1}),
        (RIGHT | {"gone": Place("committed", 2)}, {}, {"exactly_once": 6, "lost": 1}),
        (RIGHT | {"gone": Place("trained", 1)}, {"state": "active"}, {"exactly_once": 6, "lost": 1}),
        (RIGHT, {"checkpoint": CheckpointLedger()}, {"lost": 6}),
        (OF_TWICE, {"checkpoint": TWICE}, {"exactly_once": 2, "twice": 2}),
        (RIGHT | {"in no checkpoint": Place("trained", 3)}, FOUR, {"exactly_once": 6, "stuck": 1}),
        (RIGHT | {"t": Place("trained", 3)}, FOUR | {"state": "active"}, {"exactly_once": 6, "waiting": 1}),
        # A checkpoint that the broker has not heard of yet, and what was trained since the broker was asked.
        (committed(2) | dict.fromkeys(("pass-0/4", "pass-0/5"), Place("trained", 2)), BEHIND, {"exactly_once": 6}),
        (committed(2) | {"pass-0/4": Place("leased_to_trainer", 2)}, BEHIND, {"exactly_once": 6}),
        # What a checkpoint told the broker is of no step there.
        (RIGHT | {"pass-0/2": Place("committed", -1)}, {}, {"exactly_once": 6}),
        (LATER, {"forgotten": 2}, {"exactly_once": 6, "forgotten": 2}),
    ],
)
def test_what_became_of_each_instance_is_counted(places, fields, found):
    checkpoint = fields.get("checkpoint", ledger(3))
    report = audit(books(places, **{name: fields[name] for name in fields if name != "checkpoint"}), checkpoint)
    assert counts(report) == found
    assert report.ok is not any(found.get(fault) for fault in ("lost", "twice", "stuck"))


ELSEWHERE = (*map(Place, STATES), Place("dropped", 1), Place("dead"), Place("committed", 0), Place("trained", 1))


@pytest.mark.parametrize(
    ("places", "fields", "fault"),
    [
        (RIGHT | {"gone": Place("committed", 2)}, {}, "gone is lost: committed by step 2 at the broker, but in no"),
        (RIGHT, {"faults": ("queued: the broker counts 1, there are 0",)}, "queued: the broker counts 1, there are 0"),
        (LATER, {"forgotten": 1}, "2 instances are in the weights, but not in the broker's books"),
        (committed(2), BEHIND | {"state": "succeeded"}, "2 instances are in the weights, but not in"),
        *((RIGHT | {"pass-0/4": place}, {"state": "active"}, "pass-0/4 is in the weights by") for place in ELSEWHERE),
    ],
)
def test_each_fault_of_the_books_is_named(places, fields, fault):
    report = audit(books(places, **fields), ledger(3))
    assert not report.ok and fault in report.faults[0]


@pytest.mark.parametrize("steps", [[0, 1], [0, 2], [1, 2, 3], [0, 1, 2, 3]])
def test_a_ledger_that_lacks_a_step_is_a_fault(steps):
    checkpoint = CheckpointLedger(3, [(step, [f"a{step}"]) for step in steps])
    report = audit(books({f"a{step}": Place("committed", step) for step in steps}), checkpoint)
    assert not report.ok and "the ledger is incomplete" in report.faults[0]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("fields", "stuck"),
    [
        ({}, True),
        ({"ending": "data", "state": "failed", "max_steps": 3}, True),
        ({"max_steps": 3}, False),
        ({"state": "cancelled"}, False),
        ({"state": "active"}, False),
        *(({"ending": why}, False) for why in ("max_steps", "early_stop", "requested", "dead_prompts", "a newer one")),
    ],
)
def test_only_a_run_that_its_data_ended_leaves_nothing_behind(state, fields, stuck):
    report = audit(books(RIGHT | {"left": Place(state)}, **fields), ledger(3))
    assert counts(report) == {"exactly_once": 6, "stuck" if stuck else "waiting": 1}
    assert report.ok is not stuck and report.over is (fields.get("state") != "active")
    if stuck:
        assert "left is stuck" in report.faults[0]
    else:
        assert report.sentence().endswith(
            "0 stuck, 1 left over (prompts that the run did not need)" if report.over else "0 stuck, 1 waiting"
        )


def test_many_faults_of_a_kind_are_summed_up():
    report = audit(books({f"gone/{n}": Place("committed", 0) for n in range(50)}), CheckpointLedger())
    assert report.lost == 50 and len(report.faults) == 11 and report.faults[-1] == "and 40 more of these"
    assert report.sentence() == "run demo: 0 exactly once, 50 lost, 0 twice, 0 stuck"
    assert audit(books(OF_TWICE), TWICE).faults[0] == "a was trained twice, by steps 0, 1"


# The command, on a real broker ----------------------------------------------------------------------------------------


class Trained:
    """A run at a real broker, two steps of which are trained and in a checkpoint by hand."""

    def __init__(self, address: str, root: Path):
        self.address, self.root = address, root
        self.ledger = Ledger(root / "ledger.jsonl")
        life = Life(address, "demo", groups_per_step=2, max_staleness=8)
        life.submit(*(f"pass-0/{n}" for n in range(4)))
        life.answer()
        for step in range(2):
            self.ledger.append(step, life.train(step))
        life.commit(2)
        self.created_at = life.end().finish().now().created_at
        self.checkpoint(2)

    def checkpoint(self, step: int, **facts) -> None:
        folder = self.root / f"step-{step:08d}"
        folder.mkdir(parents=True)
        manifest = {
            "step": step,
            "run_id": "demo",
            "run_created_at": self.created_at.ToJsonString(),
            "ledger": self.ledger.mark(),
            "files": {},
        }
        (folder / "manifest.json").write_text(json.dumps(manifest | facts))


@pytest.fixture
def trained(address, tmp_path):
    return Trained(address, tmp_path / "checkpoints")


@pytest.fixture
def quartet(trained, capsys):
    """Run `quartet` on the broker; return its exit status and what it says, errors too."""

    def run(*arguments: str) -> tuple[int, str]:
        status = main([*arguments, "--broker", trained.address])
        return status, "".join(capsys.readouterr())

    return run


def test_a_right_run_is_one_line_and_status_0_and_a_deleted_one_is_said_to_be(trained, quartet, write):
    audited = ("audit", "demo", "--checkpoints", str(trained.root))
    right = (0, "run demo: 4 exactly once, 0 lost, 0 twice, 0 stuck\n")
    assert quartet(*audited) == right
    for keys in (f"[trainer.checkpoint]\nfolder = '{trained.root}'", f"folder = '{trained.root.parent}'\n[trainer]"):
        assert quartet("audit", "demo", "--config", str(write("run.toml", f"[run]\nid = 'demo'\n{keys}\n"))) == right
    status, out = quartet(*audited, "--json")
    report = json.loads(out)
    assert status == 0 and report["ok"] is True and report["exactly_once"] == 4 and report["checkpoint_step"] == 2
    keys = {"exactly_once", "lost", "twice", "stuck", "dropped", "dead", "waiting", "forgotten", "over", "faults", "ok"}
    assert keys <= report.keys() and report["faults"] == []
    assert quartet("runs", "delete", "demo")[0] == 0
    status, out = quartet(*audited)
    assert status == 1 and "it was deleted, or never created; only the ledger was checked" in out


def lost(run: Trained) -> None:
    (run.root / "step-00000002" / "manifest.json").unlink()


def ahead(run: Trained) -> None:
    """As if Redis was restored from an earlier state."""
    run.ledger.append(2, ["pass-0/4", "pass-0/5"])
    run.checkpoint(3)


def changed(run: Trained) -> None:
    path = run.root / "ledger.jsonl"
    path.write_text(path.read_text().replace("pass-0/1", "pass-0/9"))


@pytest.mark.parametrize(
    ("harm", "status", "words"),
    [
        (lost, 1, ["0 exactly once, 4 lost", "2 steps are committed, but the newest complete checkpoint in"]),
        (ahead, 1, ["books at step 2, checkpoint at step 3: Redis was restored from an earlier state"]),
        (changed, 1, ["the newest checkpoint's ledger cannot be used", "have the checksum"]),
        (lambda run: run.checkpoint(3, run_id="another"), 2, ["is of run 'another'", "--checkpoints"]),
        (lambda run: run.checkpoint(3, ledger=None), 2, ["has no ledger"]),
    ],
)
def test_checkpoints_that_do_not_fit_are_told(trained, quartet, harm, status, words):
    harm(trained)
    found, told = quartet("audit", "demo", "--checkpoints", str(trained.root))
    assert found == status and all(each in told for each in words), told
