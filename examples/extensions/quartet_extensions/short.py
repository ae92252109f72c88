"""A verifier: full reward for at most `words` words, less for each additional one."""

from pydantic import Field
from quartet.v1 import reward_pb2

from quartet_reward.verifiers.base import Parameters, Tools, Verdict


class ShortParameters(Parameters):
    """The parameters in `verifiers = [{ name = "short", parameters = { words = 20 } }]`."""

    words: int = Field(50, ge=1, description="Maximal number of words with full reward.")
    penalty: float = Field(0.1, ge=0, description="Subtracted for each additional word, down to 0.")


class Short:
    """Counts words. `verify` is fast; what waits awaits `admitted()` first (see `verifiers.base`)."""

    name = "short"
    description = "The completion has few words."
    parameters = ShortParameters

    async def verify(self, item: reward_pb2.ScoreItem, parameters: ShortParameters, tools: Tools) -> Verdict:
        """Return the verdict. A verifier that cannot judge the completion raises VerifierFailure."""
        words = len(item.completion.split())
        reward = max(0.0, 1.0 - parameters.penalty * max(0, words - parameters.words))
        outcome = reward_pb2.OUTCOME_CORRECT if words <= parameters.words else reward_pb2.OUTCOME_INCORRECT
        return Verdict(reward, outcome, f"{words} words, {parameters.words} allowed")
