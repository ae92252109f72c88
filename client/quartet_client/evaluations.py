"""What the metrics of an evaluation say: its figures, or that it is incomplete."""

from collections.abc import Mapping
from typing import Any


def figure_of(metrics: Mapping[str, Any], evaluation_set: str, name: str) -> Any:
    """Return `eval/{set}/{name}`; None if it was not reported, or is no figure of the set because prompts were lost."""
    return None if incomplete(metrics, evaluation_set) else metrics.get(f"eval/{evaluation_set}/{name}")


def accuracy_text(value: float | None, interval: tuple[float, float] | None, judged: int, form: str = ".1%") -> str:
    """Return "81.2% (95%: 71.3% to 88.3%, n = 80)", n the judged completions; "–" if none was judged."""
    if value is None:
        return "–"
    if interval is None:
        return f"{value:{form}}"
    return f"{value:{form}} (95%: {interval[0]:{form}} to {interval[1]:{form}}, n = {judged})"


def incomplete(metrics: Mapping[str, Any], evaluation_set: str) -> str:
    """Return "incomplete: 78 of 80" of an evaluation that lost prompts; else ""."""
    dead = metrics.get(f"eval/{evaluation_set}/dead")
    answered = metrics.get(f"eval/{evaluation_set}/prompts")
    if not isinstance(dead, int | float) or not isinstance(answered, int | float) or not dead:
        return ""
    return incomplete_of(answered, answered + dead)


def incomplete_of(answered: float, prompts: float) -> str:
    """Return the words for an evaluation of so many prompts, of which so many were answered."""
    return f"incomplete: {answered:.0f} of {prompts:.0f}"
