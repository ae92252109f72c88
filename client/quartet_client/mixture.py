"""Training prompts of several sources, interleaved by weight: a function of the weights and the position alone."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from quartet_client.prompts import Prompt

Stop = Literal["first_exhausted", "all_exhausted"]


@dataclass(frozen=True)
class Part:
    """The prompts of a source. `name` is empty if it is the only one."""

    prompts: Sequence[Prompt]
    name: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Use:
    """One use of a prompt of a mixture.

    Attributes:
        place: of the prompt in the order of its source's own pass.
        own_pass: pass over the source, from 0.
        data_pass: pass over the mixture, from 0; it never falls from one use to the next.
    """

    part: Part
    place: int
    own_pass: int
    data_pass: int


def mix(parts: Sequence[Part], passes: int, stop: Stop) -> Iterator[Use]:
    """Yield the uses of a mixture in order, endlessly if `passes` is 0.

    The next prompt is of the source whose share is furthest behind its weight. After n prompts each of two sources has
    had n times its share to within one prompt; each of k sources to within k - 1.

    Args:
        stop: a pass ends when the first of the sources has been used up once more, or when all have been.
    """
    total = sum(part.weight for part in parts)
    used = [0] * len(parts)
    ended = max if stop == "first_exhausted" else min
    while True:
        own = [count // len(part.prompts) for count, part in zip(used, parts, strict=True)]
        data_pass = ended(own)
        if passes and data_pass >= passes:
            return
        position = sum(used) + 1
        behind = [part.weight / total * position - count for part, count in zip(parts, used, strict=True)]
        chosen = behind.index(max(behind))
        part = parts[chosen]
        yield Use(part, used[chosen] % len(part.prompts), own[chosen], data_pass)
        used[chosen] += 1
