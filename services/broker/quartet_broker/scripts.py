"""The Lua scripts, one a transition, each put after the shared parts of `lua/lib`."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# In this order: later parts use earlier ones.
_LIBRARY = ("base", "life", "membership", "session")


@dataclass(frozen=True)
class Script:
    """A script's text and the SHA-1 by which Redis calls it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return the script `lua/NAME.lua`, library included."""
    folder = files("quartet_broker") / "lua"
    parts = [folder / "lib" / f"{part}.lua" for part in _LIBRARY] + [folder / f"{name}.lua"]
    text = "".join(part.read_text(encoding="utf-8") for part in parts)
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
