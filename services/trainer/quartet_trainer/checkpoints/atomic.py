"""A folder that is there whole, or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quartet_common.checkpoints import MANIFEST, REPLACED_SUFFIX, WRITING_PREFIX


@contextmanager
def atomic_folder(folder: Path, facts: dict[str, Any] | None = None) -> Iterator[Path]:
    """Give a folder to write into, which becomes `folder` when the block ends well.

    Everything is on disk (fsync) before the rename, and the rename before this returns. If the block raises, nothing
    is left. A folder of that name is replaced: it is moved aside first, so that one of the two is always there.

    Args:
        folder: the name it is to have.
        facts: what JSON can hold; written into `manifest.json` beside the size of every file. None: no manifest.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    writing = folder.with_name(WRITING_PREFIX + folder.name)
    if writing.exists():
        shutil.rmtree(writing)  # left by a process that was killed while it wrote
    writing.mkdir()
    try:
        yield writing
        if facts is not None:
            sizes = {str(p.relative_to(writing)): p.stat().st_size for p in sorted(writing.rglob("*")) if p.is_file()}
            (writing / MANIFEST).write_text(json.dumps({**facts, "files": sizes}, indent=1), encoding="utf-8")
        _sync_tree(writing)
    except BaseException:
        shutil.rmtree(writing, ignore_errors=True)
        raise
    _put_in_place(writing, folder)


def _put_in_place(writing: Path, folder: Path) -> None:
    replaced = folder.with_name(folder.name + REPLACED_SUFFIX)
    if folder.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        folder.rename(replaced)
    writing.rename(folder)
    _sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
