"""Text that others chose, as it may be shown: terminals obey control characters, and a line feed forges a line."""

import re

# C0 but tab and line feed, DEL, C1, what changes the direction of text, Unicode's own line breaks, lone surrogates.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Return a block of text with its control characters escaped as JSON escapes them: JSON stays the same JSON."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str) -> str:
    """Return `visible` text with its line feeds escaped, too."""
    return visible(text).replace("\n", "\\n")
