"""What made pages have in common."""

import re


def escaped(text: str) -> str:
    """Text in which "<word>" is no HTML element; what stands between backticks is left alone."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"<(?=[A-Za-z/!])", r"\\<", part) for part in parts[::2]]
    return "`".join(parts)
