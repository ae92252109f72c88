"""The modes of the sandbox that can be tried on this machine, and the interpreter that each can read."""

import os
import sys
from pathlib import Path

from quartet_reward.config import Mode, SandboxSection
from quartet_reward.sandbox.modes import candidates

MODES = candidates()


def settings(mode: Mode, slots: int = 4) -> SandboxSection:
    """Return settings for a mode."""
    return SandboxSection(slots=slots, python=interpreter(mode))


def interpreter(mode: Mode) -> str:
    """An interpreter that the users of a mode can read, if the one of these tests lies where only root may go."""
    own = Path(os.path.realpath(sys.base_prefix))
    if mode is Mode.NAMESPACES_UID or all(folder.stat().st_mode & 0o1 for folder in (own, *own.parents)):
        return ""
    return "/usr/bin/python3" if Path("/usr/bin/python3").exists() else ""
