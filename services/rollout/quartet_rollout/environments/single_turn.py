"""The default: a completion is one turn, and nothing answers it."""

from collections.abc import Sequence

from quartet_rollout.environments.base import Answer, Parameters, Start, Tools, Turn


class SingleTurn:
    """Ends every completion after its first turn. The rollout does not even ask it (`Chosen.single_turn`)."""

    name = "single_turn"
    description = "Nothing answers: a completion is one turn."
    parameters = Parameters

    def stop(self, parameters: Parameters) -> Sequence[str]:
        """No stop string of its own."""
        return ()

    def begin(self, start: Start, parameters: Parameters, tools: Tools) -> "SingleTurn":
        """Nothing to begin: it has no state."""
        return self

    async def answer(self, turn: Turn) -> Answer | None:
        """The completion is complete."""
        return None

    async def close(self) -> None:
        """Nothing to free."""
