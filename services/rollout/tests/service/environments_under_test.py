"""Environments of the tests: each answers as its parameters say."""

import asyncio
from contextlib import suppress
from typing import ClassVar

from pydantic import Field

from quartet_rollout.environments import Answer, EnvironmentFailed, Parameters, Start, Tools, Turn


class EchoParameters(Parameters):
    """Parameters of `echo`."""

    text: str = Field("!", description="What it answers.")
    role: str = Field("", description="Role of the answer.")
    answers: int = Field(100, ge=0, description="Turns that it answers.")
    rewards: list[float | None] = Field([], description="Rewards of the turns; with the last, the completion ends.")


class Echo:
    """Answers the same text after every turn, so many times."""

    name = "echo"
    description = "Answers the same text."
    parameters = EchoParameters
    episodes: ClassVar[list["EchoEpisode"]] = []

    def stop(self, parameters: EchoParameters) -> tuple[str, ...]:
        return ("#",)

    def begin(self, start: Start, parameters: EchoParameters, tools: Tools) -> "EchoEpisode":
        self.episodes.append(EchoEpisode(start, parameters))
        return self.episodes[-1]


class EchoEpisode:
    """Keeps what it has seen."""

    def __init__(self, start: Start, parameters: EchoParameters):
        self.start, self.parameters = start, parameters
        self.turns: list[Turn] = []
        self.closed = 0

    async def answer(self, turn: Turn) -> Answer | None:
        self.turns.append(turn)
        if len(self.turns) > self.parameters.answers:
            return None
        if rewards := self.parameters.rewards:
            return Answer("!", reward=rewards[turn.number], ends=len(self.turns) == len(rewards))
        return Answer(self.parameters.text, role=self.parameters.role)

    async def close(self) -> None:
        self.closed += 1


class BrokenParameters(Parameters):
    """Parameters of `broken`."""

    how: str = Field("raises", description="begin, raises, fails, …: see `answer`.")


WAITING: list[asyncio.Event] = []
"""Set at a test's end: an event loop does not close before its tasks have ended."""


async def deaf() -> None:
    """Do not return, cancelled or not."""
    WAITING.append(released := asyncio.Event())
    while not released.is_set():
        with suppress(asyncio.CancelledError):
            await released.wait()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Broken:
    """Fails in the way it is told to."""

    name = "broken"
    description = "Fails."
    parameters = BrokenParameters

    def stop(self, parameters: BrokenParameters) -> tuple[str, ...]:
        return ()

    def begin(self, start: Start, parameters: BrokenParameters, tools: Tools) -> "Broken":
        self.how = parameters.how
        if self.how == "begin":
            raise KeyError("no level 7")
        return self

    async def answer(self, turn: Turn):
        match self.how:
            case "fails":
                raise EnvironmentFailed("the game server is gone")
            case "permanent":
                raise EnvironmentFailed("the level does not exist", permanent=True)
            case "hangs":
                await asyncio.Event().wait()
            case "deaf":
                await deaf()
            case "unprintable":
                raise Unprintable
            case "cancels":
                raise asyncio.CancelledError("its own task")
            case "close":
                return None
            case "nan":
                return Answer("!", reward=float("nan"))
            case "odd":
                return "text alone"
        raise ZeroDivisionError("division by zero")

    async def close(self) -> None:
        if self.how == "deaf":
            await deaf()
        raise asyncio.CancelledError if self.how == "close" else OSError("nothing to close")
