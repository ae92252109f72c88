"""What an audit compares: a run's books from the broker, and the newest checkpoint with its ledger from disk."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
from pydantic import BaseModel, ConfigDict
from quartet.v1 import broker_pb2

from quartet_client.async_client import AsyncClient
from quartet_client.audit import AuditReport, Books, Checkpoint, Place, audit
from quartet_client.errors import InputError, QuartetError
from quartet_client.models import enum_name
from quartet_common.checkpoints import newest_checkpoint
from quartet_common.config import Section, load_config
from quartet_common.ledger import LEDGER_FILE, LedgerError, read_ledger

_SECONDS = 600.0  # a run of a million instances is read in less


class _Checkpoint(BaseModel):
    model_config = ConfigDict(extra="ignore")
    folder: Path | None = None


class _Trainer(Section):
    """Of [trainer] only where the checkpoints are; all else is the trainer's business."""

    model_config = ConfigDict(extra="ignore", frozen=True)
    checkpoint: _Checkpoint = _Checkpoint()


def checkpoint_folder(path: Path | None, overrides: Sequence[str], run_id: str) -> Path:
    """Where the trainer of a run puts its checkpoints, by the run file or by default. Raises ConfigError."""
    config = load_config("trainer", _Trainer, path, overrides)
    if config.section.checkpoint.folder is not None:
        return config.section.checkpoint.folder
    run = config.run if config.run.id == run_id else config.run.model_copy(update={"id": run_id})
    return run.path / "checkpoints"


async def audit_run(client: AsyncClient, run_id: str, folder: Path) -> AuditReport:
    """Audit a run against the checkpoints in `folder`.

    Raises:
        QuartetError: the broker cannot be reached, or refuses.
        InputError: the checkpoints are another run's, or have no ledger.
    """
    books = await fetch_books(client, run_id)
    # After the books: what the broker calls committed is in a checkpoint by then.
    try:
        checkpoint = read_checkpoint(folder, run_id, books.created_at if books else None)
    except LedgerError as error:
        return audit(Books(run_id, faults=[f"the newest checkpoint's ledger cannot be used: {error}"]), Checkpoint())
    if books is None:
        return audit(_deleted(run_id, checkpoint), checkpoint)
    if checkpoint.step < books.committed_step:
        missing = (
            f"{books.committed_step} steps are committed, but the newest complete checkpoint in '{folder}' has "
            f"{checkpoint.step}: name the right folder with --checkpoints, or it is lost"
        )
        books = replace(books, faults=[*books.faults, missing])
    elif checkpoint.step > books.policy_version:
        # A step is marked trained before it is in a checkpoint: unless the trainer went on since, the books lack it.
        trained = (await client.run(run_id)).policy_version
        if checkpoint.step > trained:
            behind = (
                f"books at step {trained}, checkpoint at step {checkpoint.step}: Redis was restored from an earlier "
                "state, or lost the end of its log; the trainer settles the steps between from its ledger at its start"
            )
            books = replace(books, faults=[*books.faults, behind])
    return audit(books, checkpoint)


def _deleted(run_id: str, checkpoint: Checkpoint) -> Books:
    """Books that agree with the ledger, so that only the ledger's own faults are found."""
    gone = f"the broker does not know run '{run_id}': it was deleted, or never made; only the ledger was looked at"
    trained = {name: Place("committed", step) for step, names in checkpoint.ledger for name in names}
    return Books(run_id, state="deleted", places=trained, faults=[gone])


async def fetch_books(client: AsyncClient, run_id: str) -> Books | None:
    """Ask the broker for a run's books; None if it does not know the run."""
    stub = await client.connections.stub("broker")
    places: dict[str, Place] = {}
    summary: broker_pb2.AuditSummary | None = None
    try:
        before = await client.run(run_id)
        async with client.connections.errors("broker"):
            async for part in stub.AuditRun(broker_pb2.AuditRunRequest(run_id=run_id), timeout=_SECONDS):
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
    # The instances were read between the two: whatever was trained since the first may stand as it was.
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


def read_checkpoint(folder: Path, run_id: str, created_at: str | None = None) -> Checkpoint:
    """Read the newest complete checkpoint in a folder; one of 0 steps if there is none.

    Args:
        created_at: when the run was made, as RFC 3339; None: not known.

    Raises:
        InputError: it is another run's, or of a trainer that kept no ledger.
        LedgerError: the ledger is not the checkpoint's.
    """
    found = newest_checkpoint(folder)
    if found is None:
        return Checkpoint()
    path, manifest = found
    _same_run(path, manifest, run_id, created_at)
    if not isinstance(manifest.get("ledger"), dict):
        raise InputError(f"'{path}' has no ledger: the trainer that wrote it kept none, so there is nothing to audit")
    return Checkpoint(manifest["step"], read_ledger(folder / LEDGER_FILE, manifest["ledger"]))


def _same_run(path: Path, manifest: Mapping[str, object], run_id: str, created_at: str | None) -> None:
    theirs = manifest.get("run_id"), manifest.get("run_created_at")
    if theirs[0] not in (run_id, None) or (created_at and theirs[1] not in (created_at, None)):
        raise InputError(
            f"'{path}' is of run '{theirs[0]}' created at {theirs[1]}, not of run '{run_id}'"
            + (f" created at {created_at}" if created_at else "")
            + "; name the right folder with --checkpoints"
        )
