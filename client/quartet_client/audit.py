"""`audit`: checks that each prompt group counts exactly once, by the broker's books and the trainer's ledger.

The books have the state of every instance; the ledger of the newest complete checkpoint lists the instances in its
weights. Different processes write them to different disks, so a group that one of them loses or repeats is a difference
between the two. `docs/audit.md` says what this proves, and what it does not.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from pydantic import BaseModel, ConfigDict
from quartet.v1 import broker_pb2

from quartet_client.async_client import AsyncClient
from quartet_client.errors import InputError, QuartetError
from quartet_client.from_proto import enum_name
from quartet_common.checkpoints import newest_checkpoint
from quartet_common.config import load_config
from quartet_common.ledger import LEDGER_FILE, LedgerError, read_ledger
from quartet_common.sections import Section

_NAMED = 10
_UNDER_WAY = ("queued", "leased", "ready", "leased_to_trainer", "trained")


@dataclass(frozen=True, slots=True)
class Place:
    """The broker's state of a training instance; `state` as GroupState in broker.proto, `step` -1 if none."""

    state: str
    step: int = -1


@dataclass(frozen=True, slots=True)
class Books:
    """The broker's records of a run.

    Attributes:
        state: "active", "succeeded", "failed" or "cancelled".
        policy_version: steps marked trained when the first of the instances was read.
        committed_step: steps known to be durable.
        max_steps: steps after which the run ends; 0: when the prompts end.
        ending: what ended the run, as Run.ending.
        places: of every training instance that the broker stores.
        forgotten: number of terminal instances that it no longer stores.
        faults: what the broker found wrong in its own books, in words.
    """

    run_id: str
    created_at: str = ""
    state: str = "active"
    policy_version: int = 0
    committed_step: int = 0
    prompts_ended: bool = False
    max_steps: int = 0
    ending: str = "unspecified"
    places: Mapping[str, Place] = field(default_factory=dict)
    forgotten: int = 0
    faults: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class CheckpointLedger:
    """The newest complete checkpoint: the steps in it, and (step, instance ids) of each line of its ledger."""

    step: int = 0
    ledger: Sequence[tuple[int, Sequence[str]]] = ()


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found. All but `faults` are numbers of training instances.

    Attributes:
        checkpoint_step: steps in the checkpoint that was compared; 0: there is none.
        exactly_once: in the checkpoint's weights once, and known to the broker as trained.
        lost: committed at the broker, but in no weights.
        twice: in the checkpoint's weights more than once.
        stuck: the run is over and should have finished them, but has not.
        dropped: taken out by the trainer's filters, or left over from the last batch.
        dead: set aside after too many failures.
        waiting: under way, or left over in a run that was ended before its data.
        forgotten: terminal, and no longer stored by the broker.
        over: the run has ended.
        faults: all that is wrong, in words.
    """

    run_id: str
    checkpoint_step: int
    exactly_once: int
    lost: int
    twice: int
    stuck: int
    dropped: int
    dead: int
    waiting: int
    forgotten: int
    over: bool
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not (self.lost or self.twice or self.stuck or self.faults)

    def sentence(self) -> str:
        """Return the counts in one line; those that are no error are left out if 0."""
        always = ("exactly_once", "lost", "twice", "stuck")
        counts = [(name, getattr(self, name)) for name in (*always, "waiting", "dropped", "dead", "forgotten")]
        names = {
            "waiting": "left over (prompts that the run did not need)" if self.over else "waiting",
            "exactly_once": "exactly once",
        }
        shown = [f"{count} {names.get(name, name)}" for name, count in counts if count or name in always]
        return f"run {self.run_id}: {', '.join(shown)}"


def audit(books: Books, checkpoint: CheckpointLedger) -> AuditReport:
    """Compare a run's books with its newest checkpoint, which must have been read after them."""
    steps: dict[str, list[int]] = {}
    for step, names in checkpoint.ledger:
        for name in names:
            steps.setdefault(name, []).append(step)
    states = Counter(place.state for place in books.places.values())

    # What is in the weights.
    twice = {name: at for name, at in steps.items() if len(at) > 1}
    single = {name: at[0] for name, at in steps.items() if len(at) == 1}
    later = {name for name, step in single.items() if books.state == "active" and step >= books.policy_version}
    unknown = [name for name in single if name not in books.places and name not in later]
    wrong = {
        name: place
        for name, step in single.items()
        if (place := books.places.get(name)) and name not in later and not _agree(place, step)
    }
    unheard = max(0, len(unknown) - books.forgotten)

    # What is not.
    outside = {name: place for name, place in books.places.items() if name not in steps}
    lost = {name: place for name, place in outside.items() if _should_be_in(place, checkpoint.step)}
    left = {name: place for name, place in outside.items() if place.state in _UNDER_WAY and name not in lost}
    stuck = {name: place for name, place in left.items() if _is_stuck(books, place)}

    faults = [*books.faults, *_gaps(checkpoint)]
    faults += _few(
        f"{name} is in the weights by step {single[name]}, but {_words(place)} at the broker"
        for name, place in wrong.items()
    )
    if unheard:
        faults.append(
            f"{len(unknown)} instances are in the weights, but not in the broker's books (of which it deleted "
            f"only {books.forgotten}), e.g. {unknown[0]}"
        )
    faults += _few(f"{name} is lost: {_words(place)} at the broker, but in no weights" for name, place in lost.items())
    faults += _few(f"{name} was trained twice, by steps {', '.join(map(str, at))}" for name, at in twice.items())
    faults += _few(f"{name} is stuck: {_words(place)}, and the run is over" for name, place in stuck.items())
    return AuditReport(
        run_id=books.run_id,
        checkpoint_step=checkpoint.step,
        exactly_once=len(single) - len(wrong) - unheard,
        lost=len(lost),
        twice=len(twice),
        stuck=len(stuck),
        dropped=states["dropped"],
        dead=states["dead"],
        waiting=len(left) - len(stuck),
        forgotten=books.forgotten,
        over=books.state != "active",
        faults=tuple(faults),
    )


def _agree(place: Place, step: int) -> bool:
    """Return whether the broker has the instance as trained by `step`; -1: as a checkpoint says."""
    return place == Place("trained", step) or (place.state == "committed" and place.step in (step, -1))


def _should_be_in(place: Place, checkpoint_step: int) -> bool:
    return place.state == "committed" or (place.state == "trained" and place.step < checkpoint_step)


def _is_stuck(books: Books, place: Place) -> bool:
    """Return whether a run that has ended should have finished an instance that is under way.

    A run that ended with its data leaves none behind; one that ended otherwise may leave prompts and groups. A run that
    succeeded has all that it trained in a checkpoint.
    """
    if books.state == "active":
        return False
    ended_by_data = books.ending == "data"
    if books.ending == "unspecified":  # of a release that did not record it
        reached_max_steps = 0 < books.max_steps <= books.policy_version
        ended_by_data = books.state == "succeeded" and books.prompts_ended and not reached_max_steps
    return ended_by_data or (books.state == "succeeded" and place.state == "trained")


def _gaps(checkpoint: CheckpointLedger) -> Iterator[str]:
    found = [step for step, _ in checkpoint.ledger]
    if found != list(range(checkpoint.step)):
        at = next((n for n, step in enumerate(found) if step != n), len(found))
        yield (
            f"the checkpoint has {checkpoint.step} steps, its ledger {len(found)}"
            + (f", and line {at + 1} is of step {found[at]}" if at < len(found) else "")
            + ": the ledger is incomplete"
        )


def _words(place: Place) -> str:
    state = place.state.replace("_", " ")
    return state if place.step < 0 else f"{state} by step {place.step}"


def _few(sentences: Iterable[str]) -> list[str]:
    every = list(sentences)
    more = len(every) - _NAMED
    return [*every[:_NAMED], f"and {more} more of these"] if more > 1 else every


_SECONDS = 600.0  # a run of a million instances is read in less


class _Checkpoint(BaseModel):
    model_config = ConfigDict(extra="ignore")
    folder: Path | None = None


class _Trainer(Section):
    """The key of [trainer] with the checkpoint folder; all others are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    checkpoint: _Checkpoint = _Checkpoint()


def checkpoint_folder(path: Path | None, overrides: Sequence[str], run_id: str) -> Path:
    """Return the checkpoint folder of a run: that of the run file, or the default. Raises ConfigError."""
    config = load_config("trainer", _Trainer, path, overrides)
    if config.section.checkpoint.folder is not None:
        return config.section.checkpoint.folder
    run = config.run.model_copy(update={"id": run_id})
    return run.path / "checkpoints"


async def audit_run(client: AsyncClient, run_id: str, folder: Path) -> AuditReport:
    """Audit a run against the checkpoints in `folder`.

    Raises:
        QuartetError: the broker cannot be reached, or refuses.
        InputError: the checkpoints are another run's, or have no ledger.
    """
    books = await fetch_books(client, run_id)
    # Read after the books, so that a checkpoint has every step that they have as committed.
    try:
        checkpoint = read_checkpoint(folder, run_id, books.created_at if books else None)
    except LedgerError as error:
        return audit(
            Books(run_id, faults=[f"the newest checkpoint's ledger cannot be used: {error}"]), CheckpointLedger()
        )
    if books is None:
        return audit(_deleted(run_id, checkpoint), checkpoint)
    if checkpoint.step < books.committed_step:
        missing = (
            f"{books.committed_step} steps are committed, but the newest complete checkpoint in '{folder}' has "
            f"{checkpoint.step}: name the right folder with --checkpoints, or it is lost"
        )
        books = replace(books, faults=[*books.faults, missing])
    elif checkpoint.step > books.policy_version:
        # A step is marked trained before its checkpoint is written: the books lost it, or were read before it.
        trained = (await client.get_run(run_id)).policy_version
        if checkpoint.step > trained:
            behind = (
                f"books at step {trained}, checkpoint at step {checkpoint.step}: Redis was restored from an earlier "
                "state, or lost the end of its log, or the run was rolled back; the trainer settles the steps between "
                "from its ledger at its start"
            )
            books = replace(books, faults=[*books.faults, behind])
    return audit(books, checkpoint)


def _deleted(run_id: str, checkpoint: CheckpointLedger) -> Books:
    """Return books that agree with the ledger, so that the audit finds only the ledger's own faults."""
    gone = f"the broker has no run '{run_id}': it was deleted, or never created; only the ledger was checked"
    trained = {name: Place("committed", step) for step, names in checkpoint.ledger for name in names}
    return Books(run_id, state="deleted", places=trained, faults=[gone])


async def fetch_books(client: AsyncClient, run_id: str) -> Books | None:
    """Fetch a run's books from the broker; None if the run does not exist."""
    broker = client.connections.broker
    places: dict[str, Place] = {}
    summary: broker_pb2.AuditSummary | None = None
    try:
        before = await client.get_run(run_id)
        async with broker.errors():
            async for part in broker.stub.AuditRun(broker_pb2.AuditRunRequest(run_id=run_id), timeout=_SECONDS):
                for record in part.page.instances:
                    places[record.instance_id] = Place(enum_name(broker_pb2.GroupState, record.state), record.step)
                if part.HasField("summary"):
                    summary = part.summary
    except QuartetError as error:
        if error.code is grpc.StatusCode.NOT_FOUND:
            return None
        raise
    if summary is None:
        raise QuartetError(f"the broker's audit of run '{run_id}' ended without its summary; ask again")
    run = summary.run
    # The instances were read between the two: those trained since the first may have their earlier state.
    return Books(
        run_id=run_id,
        created_at=run.created_at.ToJsonString(),
        state=before.state if before.active else enum_name(broker_pb2.RunState, run.state),
        policy_version=min(before.policy_version, run.policy_version),
        committed_step=run.committed_step,
        prompts_ended=run.prompts_ended,
        max_steps=run.spec.max_steps,
        ending=enum_name(broker_pb2.RunEnding, run.ending),
        places=places,
        forgotten=summary.forgotten,
        faults=tuple(summary.faults),
    )


def read_checkpoint(folder: Path, run_id: str, created_at: str | None = None) -> CheckpointLedger:
    """Read the newest complete checkpoint in a folder; one of 0 steps if there is none.

    Args:
        created_at: creation time of the run, as RFC 3339; None: unknown.

    Raises:
        InputError: it is another run's, or of a trainer that kept no ledger.
        LedgerError: the ledger does not match the checkpoint.
    """
    found = newest_checkpoint(folder)
    if found is None:
        return CheckpointLedger()
    path, manifest = found
    _same_run(path, manifest, run_id, created_at)
    if not isinstance(manifest.get("ledger"), dict):
        raise InputError(f"'{path}' has no ledger: the trainer that wrote it kept none, so there is nothing to audit")
    return CheckpointLedger(manifest["step"], read_ledger(folder / LEDGER_FILE, manifest["ledger"]))


def _same_run(path: Path, manifest: Mapping[str, object], run_id: str, created_at: str | None) -> None:
    theirs = manifest.get("run_id"), manifest.get("run_created_at")
    if theirs[0] not in (run_id, None) or (created_at and theirs[1] not in (created_at, None)):
        raise InputError(
            f"'{path}' is of run '{theirs[0]}' created at {theirs[1]}, not of run '{run_id}'"
            + (f" created at {created_at}" if created_at else "")
            + "; name the right folder with --checkpoints"
        )
