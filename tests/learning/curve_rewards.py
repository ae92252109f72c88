"""The reward of the mixture's easy source, which the warmed-up model has solved."""


def any_answer(completion: str) -> bool:
    """Return True if there is an answer, whatever it is."""
    return "<answer>" in completion
