"""Supervised rows of the demo's task, for sft.toml: problems worked out term by term."""

import random
from collections.abc import Iterator

from task import split, worked


def train() -> Iterator[dict[str, str]]:
    """Yield each training problem with a demonstration."""
    rng = random.Random(0)
    for problem in split()[0]:
        yield {"prompt": problem, "completion": worked(problem, rng)}


def shuffled() -> Iterator[dict[str, str]]:
    """Yield the rows of `train` with their completions dealt to other problems: the control, of which nothing but the
    form can be learned."""
    rows = list(train())
    completions = [row["completion"] for row in rows]
    random.Random(1).shuffle(completions)
    for row, completion in zip(rows, completions, strict=True):
        yield {"prompt": row["prompt"], "completion": completion}


def held_out() -> Iterator[dict[str, str]]:
    """Yield the problems that are never trained on, with a demonstration."""
    rng = random.Random(2)
    for problem in split()[1]:
        yield {"prompt": problem, "completion": worked(problem, rng)}
