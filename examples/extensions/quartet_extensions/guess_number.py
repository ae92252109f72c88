"""An environment: the policy guesses a number; the answer is whether it was too low or too high."""

import re

from pydantic import Field

from quartet_rollout.environments import Answer, EnvironmentFailed, Parameters


class GuessParameters(Parameters):
    """The keys of `[run.environment.parameters]`."""

    warmth: int = Field(0, ge=0, description="A guess at most this far from the number counts as right.")


class GuessNumber:
    """Created once; `begin` creates a game for each completion."""

    name = "guess_number"
    description = "Answers whether a guess is too low or too high."
    parameters = GuessParameters

    def stop(self, parameters):
        """Return the strings that end a turn of the policy."""
        return ("?",)

    def begin(self, start, parameters, tools):
        """Start a game; the number is the prompt's reference answer."""
        try:
            return Game(int(start.prompt.reference.answer), parameters.warmth)
        except ValueError as error:
            raise EnvironmentFailed("the reference answer is not a number", permanent=True) from error


class Game:
    """One completion's game."""

    def __init__(self, number: int, warmth: int):
        self.number, self.warmth = number, warmth

    async def answer(self, turn):
        """Return the answer to a turn; None ends the completion."""
        guesses = re.findall(r"\d+", turn.text)
        if not guesses:
            return Answer(" A number, please. ")
        away = int(guesses[-1]) - self.number
        if abs(away) <= self.warmth:
            return None
        return Answer(" Too low. " if away < 0 else " Too high. ")

    async def close(self):
        """There are no resources to release."""
