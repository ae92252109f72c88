"""The demo's task: chains of four numbers from 1 to 5, e.g. ``2+3-1+2=?``.

One problem in eight, by a hash of its text, is held out of warm-up and training.
"""

import hashlib
import itertools
import random

HELD_OUT_SHARE = 8

# Share of habit demonstrations that guess instead of working it out, and the probability of a mistake in each step.
GUESS_SHARE = 0.6
SLIP_RATE = 0.12


def all_problems() -> list[str]:
    """Return all 5,000 problems, in a fixed order."""
    digits = "12345"
    return [
        f"{a}{x}{b}{y}{c}{z}{d}=?"
        for a, b, c, d in itertools.product(digits, repeat=4)
        for x, y, z in itertools.product("+-", repeat=3)
    ]


def is_held_out(problem: str) -> bool:
    """Return True for the problems that are never trained on."""
    return hashlib.sha256(problem.encode()).digest()[0] % HELD_OUT_SHARE == 0


def split() -> tuple[list[str], list[str]]:
    """Return (training problems, held-out problems)."""
    problems = all_problems()
    return [p for p in problems if not is_held_out(p)], [p for p in problems if is_held_out(p)]


def terms(problem: str) -> list[int]:
    """Return the signed terms: ``2+3-1+2=?`` gives [2, 3, -1, 2]."""
    expression = problem.removesuffix("=?")
    return [int(expression[0]), *(int(expression[i : i + 2]) for i in range(1, len(expression), 2))]


def answer(problem: str) -> int:
    """Return the right answer."""
    return sum(terms(problem))


def worked(problem: str, rng: random.Random, slip_rate: float = 0.0) -> str:
    """Return a demonstration that works it out term by term; steps are off by one at the given rate."""
    first, *rest = terms(problem)
    total, steps = first, str(first)
    for term in rest:
        total += term
        if rng.random() < slip_rate:
            total += rng.choice((-1, 1))
        steps += f"{term:+d}={total}"
    return f"<think>{steps}</think>{_answered(total, rng)}"


def guessed(problem: str, rng: random.Random) -> str:
    """Return a demonstration that shows no work and guesses a number near the answer."""
    return f"<think></think>{_answered(answer(problem) + rng.randint(-3, 3), rng)}"


def habit(problem: str, rng: random.Random) -> str:
    """Return a demonstration of the bad habit, which reinforcement learning must break."""
    return guessed(problem, rng) if rng.random() < GUESS_SHARE else worked(problem, rng, SLIP_RATE)


def _answered(value: int, rng: random.Random) -> str:
    return f"<answer>\\boxed{{{value}}}</answer>" if rng.random() < 0.5 else f"<answer>{value}</answer>"
