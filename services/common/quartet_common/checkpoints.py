"""Reads checkpoints: folders that are complete if they have a manifest, which is written last.

`step-00000012/manifest.json` holds {"step", "run_id", "run_created_at", "ledger", "files": {name: bytes}, ...}. Its
"ledger" is a mark of the ledger beside the checkpoints (`quartet_common.ledger`). Only the trainer reads the rest.
"""

import json
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
WRITING_PREFIX = ".writing-"
REPLACED_SUFFIX = ".replaced"


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a complete checkpoint, or None, also if the folder is removed meanwhile."""
    if folder.name.startswith(WRITING_PREFIX):
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
            return None
        if any((folder / name).stat().st_size != size for name, size in manifest["files"].items()):
            return None
    except (OSError, ValueError):
        return None
    return manifest


def part_of(folder: Path, part: str) -> Path:
    """Return the "model" or "adapter" in a complete checkpoint's folder; any other folder as it is."""
    inside = folder / part
    return inside if inside.is_dir() and read_manifest(folder) is not None else folder


def newest_checkpoint(root: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the complete checkpoint with the most steps under `root`, and its manifest; None if there is none."""
    if not root.is_dir():
        return None
    newest: tuple[Path, dict[str, Any]] | None = None
    for folder in sorted(root.iterdir()):  # so that "step-3" wins over "step-3.replaced"
        manifest = read_manifest(folder)
        if manifest is None or not isinstance(manifest.get("step"), int):
            continue
        if newest is None or manifest["step"] > newest[1]["step"]:
            newest = folder, manifest
    return newest
