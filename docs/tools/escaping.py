"""Escaping for generated pages."""

import re


def escaped(text: str) -> str:
    """Return a text with "<word>" escaped, except between backticks."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"<(?=[A-Za-z/!])", r"\\<", part) for part in parts[::2]]
    return "`".join(parts)
