"""Word problems in the manner of GSM8K, two or three steps of arithmetic each, and how they are worked out.

One problem in eight, by a hash of its text, is held out of warm-up and training.
"""

import hashlib
import random
from dataclasses import dataclass

PEOPLE = (
    *((name, "She", "her") for name in ("Anna", "Lena", "Mia", "Zoe", "Ruth", "Olga", "Nina", "Eva")),
    *((name, "He", "him") for name in ("Tom", "Omar", "Ben", "Liam", "Noah", "Paul", "Hugo", "Karl")),
)
ITEMS = (
    "apples",
    "pens",
    "books",
    "coins",
    "stickers",
    "marbles",
    "cards",
    "eggs",
    "stamps",
    "shells",
    "cookies",
    "keys",
)
HOLDERS = ("bags", "boxes", "jars", "baskets")
PLACES = ("at the market", "on the way home", "in the garden", "at school", "after lunch")
GAINS = (
    "{they} buys {n} more {place}.",
    "{they} finds {n} more {place}.",
    "{friend} gives {them} {n} {items} {place}.",
    "{they} gets {n} {items} from {friend}.",
)
LOSSES = (
    "{they} loses {n} of them {place}.",
    "{they} gives {n} {items} to {friend}.",
    "{they} sells {n} of them {place}.",
    "{friend} takes {n} of the {items}.",
)
MOST = 30  # the largest total
HELD_OUT_SHARE = 8

# Share of habit demonstrations that guess instead of working it out, and the probability of a mistake in each step.
GUESS_SHARE = 0.6
SLIP_RATE = 0.12


@dataclass(frozen=True)
class Problem:
    """A problem's text, and its steps: the first number, then operator and number of each step."""

    text: str
    first: int
    steps: tuple[tuple[str, int], ...]

    @property
    def answer(self) -> int:
        """The right answer."""
        return self.totals()[-1]

    def totals(self, slips: random.Random | None = None) -> list[int]:
        """Return the total after each step, with random mistakes of one."""
        totals = [self.first]
        for operator, number in self.steps:
            total = totals[-1]
            total = total * number if operator == "*" else total + number if operator == "+" else total - number
            if slips and slips.random() < SLIP_RATE:
                total += slips.choice((-1, 1))
            totals.append(total)
        return totals

    def worked(self, slips: random.Random | None = None) -> str:
        """Return a completion that works it out step by step, before it answers."""
        totals = self.totals(slips)
        lines = [f"{totals[i]}{operator}{number}={totals[i + 1]}" for i, (operator, number) in enumerate(self.steps)]
        return completion("\n".join(lines), totals[-1])

    def habit(self, rng: random.Random) -> str:
        """Return a completion of the bad habit, which reinforcement learning must break."""
        if rng.random() < GUESS_SHARE:
            return completion("", max(0, self.answer + rng.randint(-3, 3)))
        return self.worked(rng)


def completion(thoughts: str, answer: int) -> str:
    """Return a completion: thoughts between their tags, then the answer in a box."""
    return f"<think>\n{thoughts}\n</think>\n\n\\boxed{{{answer}}}"


def draw(rng: random.Random) -> Problem:
    """Return a problem whose totals are between 1 and `MOST`."""
    while True:
        (name, they, them), (friend, *_) = rng.sample(PEOPLE, 2)
        words = {"they": they, "them": them, "friend": friend, "items": rng.choice(ITEMS)}
        first, steps = rng.randint(2, 9), []
        if rng.random() < 0.5:
            steps.append(("*", rng.randint(2, 4)))
            sentences = [f"{name} has {steps[0][1]} {rng.choice(HOLDERS)} with {first} {words['items']} in each."]
        else:
            sentences = [f"{name} has {first} {words['items']}."]
        for _ in range(rng.randint(2 - len(steps), 2)):
            operator, number = rng.choice("+-"), rng.randint(2, 9)
            steps.append((operator, number))
            sentence = rng.choice(GAINS if operator == "+" else LOSSES)
            sentences.append(sentence.format(n=number, place=rng.choice(PLACES), **words))
        question = f"How many {words['items']} does {name} have now?"
        problem = Problem(" ".join([*sentences, question]), first, tuple(steps))
        if all(1 <= total <= MOST for total in problem.totals()):
            return problem


def split(train: int, held_out: int, seed: int = 0) -> tuple[list[Problem], list[Problem]]:
    """Return as many different problems to train on, and to evaluate with."""
    rng = random.Random(seed)
    kinds: tuple[dict[str, Problem], dict[str, Problem]] = ({}, {})
    while len(kinds[0]) < train or len(kinds[1]) < held_out:
        problem = draw(rng)
        held = hashlib.sha256(problem.text.encode()).digest()[0] % HELD_OUT_SHARE == 0
        if len(kinds[held]) < (train, held_out)[held]:
            kinds[held][problem.text] = problem
    return list(kinds[0].values()), list(kinds[1].values())
