"""docs/trl.md: the table of TRL's arguments and their keys here, from quartet_common's other_names.toml. The rest of
the page is handwritten."""

import re
from pathlib import Path
from typing import Any

import run_file

from quartet_common.refusals import OtherName, other_names

PAGE = Path(__file__).resolve().parents[1] / "trl.md"
_START, _END = "<!-- made by docs/tools/write.py: change other_names.toml -->\n", "<!-- end of what is made -->\n"


def page(schemas: dict[str, dict[str, Any]]) -> str:
    """Return the existing page with a new table."""
    before, _, rest = PAGE.read_text().partition(_START)
    return before + _START + _table(schemas) + _END + rest.partition(_END)[2]


def _table(schemas: dict[str, dict[str, Any]]) -> str:
    defaults, (keys, _) = run_file.defaults(schemas), run_file.keys(schemas)
    rows = [
        f"| `{one.name}` | {_code(one.default)} | {_here(one, keys, defaults)} |"
        for one in other_names()
        if one.project == "TRL"
    ]
    return "\n".join(["", "| there | default there | here |", "|---|---|---|", *rows, "", ""])


def _here(one: OtherName, keys: set[str], defaults: dict[str, str]) -> str:
    shown = [f"`{key}`{f' ({defaults[key]})' if defaults.get(key) else ''}" for key in one.key.split(", ") if key]
    # Keys and quoted values in a note are in code font too.
    note = re.sub(
        r'[a-z]+(?:\.[a-z_]+)+(?: = (?:"\w+"|true|false))?|"[^"]*"',
        lambda found: f"`{found[0]}`" if found[0].partition(" ")[0] in keys or found[0][0] == '"' else found[0],
        one.note,
    )
    return ": ".join(filter(None, [", ".join(shown) or "not here", note])).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{text}`" if text else ""
