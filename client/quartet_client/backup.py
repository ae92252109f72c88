"""A backup: a folder with a run's data in Redis, its newest checkpoint and its ledger, and a manifest of all files.

manifest.json            run, steps, time, versions; size and SHA-256 of each file; written last
redis/                   books and values, by `quartet_broker.backup`
checkpoints/step-N/      the newest complete checkpoint, if there is one
checkpoints/ledger.jsonl
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quartet_client.audit import read_checkpoint
from quartet_client.errors import InputError
from quartet_common.build import read_build
from quartet_common.checkpoints import MANIFEST, newest_checkpoint, read_manifest
from quartet_common.ledger import LEDGER_FILE, LedgerError, read_ledger, sync

RedisHalf = Callable[[str, str, Path], dict[str, Any]]
"""Saves, checks or restores a run's data in Redis: action, run, folder."""


def back_up(folder: Path, run_id: str, checkpoints: Path, redis: RedisHalf) -> dict[str, Any]:
    """Write a backup to a new folder and return its manifest. The folder appears when the backup is complete.

    Raises:
        InputError: the folder exists, or the checkpoints do not go with the run.
    """
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"'{folder}' exists: name a new folder, or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)  # of a backup that was interrupted
    writing.mkdir(mode=0o700)
    try:
        (writing / "redis").mkdir()
        run = redis("save", run_id, writing / "redis")  # first: a checkpoint may be newer than the books
        step = _copy_newest(checkpoints, writing / "checkpoints", run_id, run["run_created_at"])
        if step < run["committed_step"]:
            raise InputError(
                f"run '{run_id}' has {run['committed_step']} committed steps, but the newest complete checkpoint in "
                f"'{checkpoints}' has {step}: run this on the trainer's host, or name the folder with --checkpoints"
            )
        manifest = {
            "format": 1,
            "run_id": run_id,
            "taken_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "quartet": read_build(),
            **run,
            "checkpoint_step": step,
            "files": {name: _measure(path) for name, path in sorted(_files(writing).items())},
        }
        text = json.dumps({"sha256": _digest(manifest), **manifest}, indent=1)
        (writing / MANIFEST).write_text(text, encoding="utf-8")
        for path in (*writing.rglob("*"), writing):
            sync(path)
        os.rename(writing, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return manifest


def verify(folder: Path) -> dict[str, Any]:
    """Return the manifest of a backup. Raises InputError that names each file that is missing or was altered."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        whole = manifest.pop("sha256") == _digest(manifest)
    except FileNotFoundError:
        raise InputError(
            f"'{folder}' is no complete backup: it has no {MANIFEST}, which is written last; name the folder of another"
        ) from None
    except (ValueError, TypeError, AttributeError, KeyError):
        whole = False
    if not whole:
        raise InputError(f"'{folder / MANIFEST}' was altered: take another backup, or another copy of this one")
    found = _files(folder)
    wrong = [f"'{folder / name}' is missing" for name in manifest["files"] if name not in found]
    for name, measured in manifest["files"].items():
        if name in found and _measure(found[name]) != measured:
            wrong.append(f"'{folder / name}' was altered")
    if wrong:
        raise InputError("; ".join(wrong) + ": take another backup, or another copy of this one")
    return manifest


def restore(folder: Path, manifest: dict[str, Any], checkpoints: Path, redis: RedisHalf) -> list[str]:
    """Restore a verified backup: what is missing or damaged of checkpoints and ledger, then Redis.

    Returns the names of the files that were put into `checkpoints`.

    Raises:
        InputError: Redis has the run, or checkpoints and ledger do not go together; Redis was not changed.
    """
    run_id = manifest["run_id"]
    redis("check", run_id, folder / "redis")
    placed = _restore_files(folder / "checkpoints", checkpoints, run_id, manifest["run_created_at"])
    redis("restore", run_id, folder / "redis")
    return placed


def _copy_newest(checkpoints: Path, to: Path, run_id: str, created_at: str) -> int:
    """Copy the newest complete checkpoint, then the ledger; return the checkpoint's step, 0 if there is none."""
    while (newest := newest_checkpoint(checkpoints)) is not None:
        try:
            _copy_checkpoint(*newest, to / newest[0].name)
            break
        except FileNotFoundError:  # the trainer removed it (trainer.checkpoint.keep_last): there is a newer one
            shutil.rmtree(to, ignore_errors=True)
    ledger = checkpoints / LEDGER_FILE
    if newest and ledger.is_file():
        shutil.copyfile(ledger, to / LEDGER_FILE)
    try:
        return read_checkpoint(to, run_id, created_at).step
    except LedgerError as error:
        raise InputError(
            f"the newest checkpoint in '{checkpoints}' and its ledger do not belong together: {error}"
        ) from error


def _copy_checkpoint(source: Path, manifest: dict[str, Any], to: Path) -> None:
    for name in (*manifest["files"], MANIFEST):  # complete with its last file
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, to / name)


def _restore_files(backup: Path, checkpoints: Path, run_id: str, created_at: str) -> list[str]:
    placed = []
    for source in sorted(backup.glob("*/")):
        place = checkpoints / source.name
        manifest, other = read_manifest(source), read_manifest(place)
        # One of the same name with another manifest is of steps that were trained after the backup.
        if manifest is None or (other is not None and other != manifest):
            continue
        if other is None or any(_measure(place / name) != _measure(source / name) for name in manifest["files"]):
            shutil.rmtree(place, ignore_errors=True)
            _copy_checkpoint(source, manifest, place)
            placed.append(source.name)
    ledger, saved, newest = checkpoints / LEDGER_FILE, backup / LEDGER_FILE, newest_checkpoint(checkpoints)
    try:
        read_checkpoint(checkpoints, run_id, created_at)
    except LedgerError as lost:
        try:
            read_ledger(saved, newest[1]["ledger"] if newest else None)
        except LedgerError as error:
            raise InputError(
                f"{lost}; nor has the backup that checkpoint's ledger: move the checkpoint away"
            ) from error
        shutil.copyfile(saved, ledger)
        placed.append(LEDGER_FILE)
    return placed


def _files(folder: Path) -> dict[str, Path]:
    """Return the files under a folder, without its manifest, by their names relative to it."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: path for name, path in found.items() if name != MANIFEST}


def _measure(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
