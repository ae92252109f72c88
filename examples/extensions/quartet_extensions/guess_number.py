"""An environment: the policy guesses a number, and is told whether it was too low or too high."""

import re

from pydantic import Field

from quartet_rollout.environments import Answer, EnvironmentFailed, Parameters


class GuessParameters(Parameters):
    """What a run may say of it: `[run.environment.parameters]`."""

    warmth: int = Field(0, ge=0, description="A guess so near counts as found.")


class GuessNumber:
    """Made once; `begin` makes what answers one completion."""

    name = "guess_number"
    description = "Tells whether a guess is too low or too high."
    parameters = GuessParameters

    def stop(self, parameters):
        """A turn of the policy ends at a question mark."""
        return ("?",)

    def begin(self, start, parameters, tools):
        """The number is the prompt's reference answer."""
        try:
            return Game(int(start.prompt.reference.answer), parameters.warmth)
        except ValueError as error:
            raise EnvironmentFailed("the reference answer is no number", permanent=True) from error


class Game:
    """One completion's game."""

    def __init__(self, number: int, warmth: int):
        self.number, self.warmth = number, warmth

    async def answer(self, turn):
        """Answer a turn; None ends the completion."""
        guesses = re.findall(r"\d+", turn.text)
        if not guesses:
            return Answer(" A number, please. ")
        away = int(guesses[-1]) - self.number
        if abs(away) <= self.warmth:
            return None
        return Answer(" Too low. " if away < 0 else " Too high. ")

    async def close(self):
        """Nothing to let go of."""
