"""The Lua scripts, one a transition, each put after the shared parts of `lua/lib`."""

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

# In this order: later parts use earlier ones.
_LIBRARY = ("base", "moments", "life", "settle", "membership", "session")


@dataclass(frozen=True)
class Script:
    """A script's text and the SHA-1 by which Redis calls it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Return the script `lua/NAME.lua`, library included; what it counted is written when it ends (`finish`)."""
    folder = files("quartet_broker") / "lua"
    library = "".join((folder / "lib" / f"{part}.lua").read_text(encoding="utf-8") for part in _LIBRARY)
    body = (folder / f"{name}.lua").read_text(encoding="utf-8")
    text = f"{library}\nreturn finish((function()\n{body}\nend)())\n"
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
