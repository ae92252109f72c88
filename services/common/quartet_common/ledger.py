"""The ledger: which prompt instances are in the weights, by optimizer step. Written by the trainer, read by the audit.

`ledger.jsonl` stands beside the checkpoints, one line per step: `{"step":12,"instances":["pass-0/17",...]}`. A
checkpoint's manifest has a *mark* under "ledger": length and checksum of the ledger's part that belongs to the
checkpoint. Lines beyond the newest checkpoint's mark are of steps that a restart undoes: `rewind` removes them.

The ledger is synced to disk before the checkpoint with its mark is complete: after a crash at any point, a complete
checkpoint's part of the ledger exists.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

LEDGER_FILE = "ledger.jsonl"

Mark = Mapping[str, Any]
"""What `Ledger.mark` returned: {"bytes": length of the part, "xxh3": its XXH3-64 in hex, "steps": lines in it,
"digest": their `ledger_digest`}. No digest, or None: unknown, as in a mark of an earlier release."""

_CHUNK = 1 << 20
_SETTLED_AT_ONCE = 4000  # instances per SettleTrained, which take Redis some tens of milliseconds


class LedgerError(Exception):
    """The ledger does not match a mark, or cannot be read; the text is one sentence."""


def append_whole(file: BinaryIO, line: bytes, end: int) -> None:
    """Append a line to an unbuffered file of `end` bytes. If it raises OSError, no part of the line is left."""
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(end)
        raise


class Ledger:
    """Writes a trainer's ledger. The file is opened at first use and truncated after its last whole line.

    Each method may raise OSError.
    """

    def __init__(self, path: Path):
        """`path`: the file; it and its folder need not exist yet."""
        self._path = path
        self._file: BinaryIO | None = None
        self._hash = xxhash.xxh3_64()
        self._bytes = 0
        self._steps = 0
        self._digest: str | None = None

    def append(self, step: int, instance_ids: Sequence[str]) -> None:
        """Add the batch that `step` trained. It is durable after the next `mark`."""
        line = json.dumps({"step": step, "instances": list(instance_ids)}, separators=(",", ":")).encode() + b"\n"
        file = self._opened()
        append_whole(file, line, self._bytes)
        known = self._digest is not None and step == self._steps
        self._digest = ledger_digest([instance_ids], self._digest or "") if known else None
        self._count(line)

    def mark(self) -> dict[str, Any]:
        """Make all lines durable, and return the mark that the checkpoint of these steps must have."""
        os.fsync(self._opened().fileno())
        sync(self._path.parent)
        counted = {"bytes": self._bytes, "xxh3": self._hash.hexdigest(), "steps": self._steps}
        return {**counted, "digest": self._digest}

    def rewind(self, mark: Mark | None) -> None:
        """Cut the ledger back to a checkpoint's mark; None: to an empty ledger.

        The rest is copied to a new file that replaces the old one: a trainer that was replaced but still runs appends
        to the old file, which is not read any more.

        Raises:
            LedgerError: the file does not match the mark; it is not changed.
        """
        checked = xxhash.xxh3_64() if mark is None else _check(self._path, mark)
        self.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        writing = self._path.with_name(f".{self._path.name}.writing")
        with writing.open("wb") as new:
            for chunk in _part(self._path, mark["bytes"] if mark else 0):
                new.write(chunk)
            new.flush()
            os.fsync(new.fileno())
        os.replace(writing, self._path)
        if mark is None:
            mark = {"bytes": 0, "steps": 0, "digest": ""}
        if mark.get("digest") is not None:  # all that would be counted in the file is known
            self._hash, self._bytes, self._steps, self._digest = checked, mark["bytes"], mark["steps"], mark["digest"]
            self._file = self._path.open("ab", buffering=0)

    def close(self) -> None:
        """Close the file; the ledger can still be used."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._hash, self._bytes, self._steps = xxhash.xxh3_64(), 0, 0
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch()
            with self._path.open("rb") as written:
                for line in written:
                    if line.endswith(b"\n"):  # else the writer was killed
                        self._count(line)
            self._digest = None if self._steps else ""
            # Unbuffered, so that no appended line is lost if the process is killed.
            self._file = self._path.open("ab", buffering=0)
            self._file.truncate(self._bytes)
        return self._file

    def _count(self, line: bytes) -> None:
        self._hash.update(line)
        self._bytes += len(line)
        self._steps += 1


def read_ledger(path: Path, mark: Mark | None) -> list[tuple[int, list[str]]]:
    """Return (step, instance ids) of each line within a checkpoint's mark, in order; nothing without a mark.

    Raises:
        LedgerError: the file does not match the mark, or cannot be read.
    """
    if mark is None:
        return []
    _check(path, mark)
    return list(_lines(path, mark))


def ledger_digest(batches: Iterable[Sequence[str]], before: str = "") -> str:
    """Return the digest of the batches of steps in order: OpenSessionResponse.ledger_digest.

    `before`: the digest of the steps before them.
    """
    for instance_ids in batches:
        text = "\n".join([before, *instance_ids])
        before = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return before


def settlement(
    path: Path, mark: Mark | None, books: int, checkpoint: int, digest: str
) -> Iterator[list[tuple[int, list[str]]]]:
    """Yield the steps that a broker's books lack, as lists of (step, instance ids) for one SettleTrained each.

    Before anything is yielded, the ledger is checked to be complete and of the same history as the books.

    Args:
        mark: the checkpoint's.
        books: steps that the books have (OpenSessionResponse.settle_from_step).
        checkpoint: steps in the checkpoint.
        digest: of the steps in the books; empty: unknown, not compared. If the books are at the checkpoint, it is
            compared with the mark's, and the lines are read only if that is unknown or another.

    Raises:
        LedgerError: a step is missing, or the books are not of this ledger's history.
    """
    if books == checkpoint and (not digest or mark is None):
        return
    where = f"books at step {books}, checkpoint at step {checkpoint}: the ledger '{path}'"
    if mark is not None:
        _check(path, mark)
        if books == checkpoint == mark.get("steps") and digest == mark.get("digest"):
            return
    steps, found = 0, ""
    for step, instance_ids in _lines(path, mark):
        if step != steps:
            break
        if digest and step < books:
            found = ledger_digest([instance_ids], found)
        steps += 1
    if steps < checkpoint:
        raise LedgerError(
            f"{where} lacks step {steps}, so that its groups would be trained again: put back the ledger that was "
            "beside the checkpoint, or start another run"
        )
    if digest and found != digest:
        raise LedgerError(
            f"{where} has other groups in the steps below {books} than the books: Redis and the checkpoint are of "
            "different histories of the run. Restore a Redis of this checkpoint's history, or the checkpoints and the "
            "ledger of this Redis'"
        )
    if books >= checkpoint:
        return
    part: list[tuple[int, list[str]]] = []
    size = 0
    for step, instance_ids in _lines(path, mark):
        if step < books:
            continue
        part.append((step, instance_ids))
        size += 1 + len(instance_ids)
        if size >= _SETTLED_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _check(path: Path, mark: Mark) -> xxhash.xxh3_64:
    """Return the hash of the part that a mark describes, to go on with. Raises LedgerError."""
    try:
        wanted, checksum = int(mark["bytes"]), str(mark["xxh3"])
    except (TypeError, KeyError, ValueError) as error:
        raise LedgerError(f"a ledger's mark has the fields bytes and xxh3; got {mark!r}") from error
    if not path.is_file():
        raise LedgerError(f"'{path}' is missing; the checkpoint's ledger has {wanted} bytes")
    found, hashed = 0, xxhash.xxh3_64()
    for chunk in _part(path, wanted):
        found += len(chunk)
        hashed.update(chunk)
    if found < wanted:
        raise LedgerError(f"'{path}' has {found} bytes; the checkpoint's ledger has {wanted}")
    if hashed.hexdigest() != checksum:
        raise LedgerError(
            f"the first {wanted} bytes of '{path}' have the checksum {hashed.hexdigest()}, the checkpoint says "
            f"{checksum}: it is another run's ledger, or was changed"
        )
    return hashed


def _lines(path: Path, mark: Mark | None) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines within a mark that was checked, reading the file in chunks."""
    rest = b""
    for chunk in _part(path, mark["bytes"] if mark else 0):
        *lines, rest = (rest + chunk).split(b"\n")
        try:  # in one call: a long ledger is read at each start
            entries = [(entry["step"], entry["instances"]) for entry in json.loads(b"[%b]" % b",".join(lines))]
        except (ValueError, TypeError, KeyError) as error:
            raise LedgerError(f"'{path}' is no ledger: a line is not {{step, instances}}: {error}") from error
        yield from entries


def _part(path: Path, size: int) -> Iterator[bytes]:
    """Yield the first `size` bytes of a file, or all if it has fewer, in chunks."""
    if size <= 0:
        return
    with path.open("rb") as file:
        while size > 0:
            chunk = file.read(min(size, _CHUNK))
            if not chunk:
                return
            size -= len(chunk)
            yield chunk


def sync(path: Path) -> None:
    """Write a file or the entries of a folder to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
