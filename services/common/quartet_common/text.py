"""Text that programs chose, as messages can carry it."""


def encodable(text: str, most: int | None = None) -> str:
    """Return text that UTF-8, and so a protobuf field, can hold: a lone surrogate becomes its escape, `\\ud800`.

    Args:
        most: characters; longer text is cut and ends in "…".
    """
    text = text[: None if most is None else most + 1].encode(errors="backslashreplace").decode()
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def error_text(error: BaseException, most: int = 500) -> str:
    """Return "KeyError: 'a'" of any exception, at most `most` characters; its own text may fail."""
    try:
        said = str(error)
    except Exception as failure:
        said = f"its text cannot be made ({type(failure).__name__})"
    return encodable(f"{type(error).__name__}: {said}", most)
