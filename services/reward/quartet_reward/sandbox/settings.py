"""[reward.sandbox]: how many programs run at a time, and how strongly they must be isolated."""

import os
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Mode(StrEnum):
    """Modes from the strongest to the weakest, see docs/sandbox.md."""

    NAMESPACES_UID = "namespaces+uid"
    """Namespaces, and a user of its own for each slot: the service runs as root."""
    NAMESPACES = "namespaces"
    """Namespaces of an ordinary user."""
    UID = "uid+landlock+seccomp"
    """No namespaces: a user of its own for each slot, Landlock and a filter of system calls."""
    UNSAFE = "unsafe"
    """Limits and a killed process group; nothing keeps a program from files or the network."""


class SandboxSection(BaseModel):
    """How programs are isolated."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    required: bool = Field(
        False,
        description="Refuse to start where no mode holds that is strong enough. A run that names `code` requires it.",
    )
    minimum: Mode = Field(Mode.UID, description="The weakest mode that will do; below it no program is run.")
    slots: int = Field(4, ge=2, le=512, description="Programs that run at one time; a judged execution takes two.")
    fork_servers: int = Field(1, ge=1, le=64, description="Processes that fork; each about 15 MB and one core at most.")
    first_uid: int = Field(
        60600,
        ge=1000,
        le=2**31,
        description="As root: the first of slots + 2 × fork_servers users that nobody else has; "
        "those of another sandbox are passed over.",
    )
    packages: tuple[str, ...] = Field(
        (), description="Absolute paths of folders whose packages programs may import; nothing secret may lie there."
    )
    python: str = Field(
        "",
        description="Absolute path of the interpreter (3.11 or newer) that runs programs; default: the service's own.",
    )

    @field_validator("packages")
    @classmethod
    def _folders(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for path in value:
            if not os.path.isabs(path) or not os.path.isdir(path) or os.path.realpath(path).startswith("/tmp"):
                raise ValueError(f"packages: {path!r} must be the absolute path of a folder, not under /tmp")
        return value
