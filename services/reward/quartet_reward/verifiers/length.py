"""Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): long completions lose reward before they are cut off.

With L tokens, a limit M and a buffer B: 0 up to M - B, then falling to -penalty at M, where it stays.
(ColossalChat's version jumps back to 0 at M.)
"""

from pydantic import Field
from quartet.v1 import reward_pb2

from quartet_reward.errors import InvalidItem
from quartet_reward.verifiers.base import Parameters, Tools, Verdict

_LARGEST_DEFAULT_BUFFER = 1024


class LengthParameters(Parameters):
    penalty: float = Field(10.0, ge=0, description="What the longest completion loses.")
    max_tokens: int = Field(0, ge=0, description="The limit M, in tokens; 0: the item's max_new_tokens.")
    buffer_tokens: int = Field(0, ge=0, description="The buffer B, in tokens; 0: a quarter of M, at most 1024.")


class Length:
    """-penalty · min(max(L - (M - B), 0), B) / B. Needs no reference.

    >>> score("length", "of 90 tokens", tokens=90, max_tokens=100, buffer_tokens=20)
    (-5.0, 'unjudged')
    """

    name = "length"
    description = "Soft overlong punishment: 0 until a buffer before the token limit, then falling linearly; at most 0."
    parameters = LengthParameters

    def verify(self, item: reward_pb2.ScoreItem, parameters: LengthParameters, tools: Tools) -> Verdict:
        limit = parameters.max_tokens or item.max_new_tokens
        if item.completion_tokens <= 0 or limit <= 0:
            raise InvalidItem(
                f"completion_tokens: got {item.completion_tokens}, max_new_tokens: got {item.max_new_tokens}; "
                "the verifier 'length' needs both to be positive (or its parameter max_tokens)"
            )
        buffer = min(parameters.buffer_tokens or min(_LARGEST_DEFAULT_BUFFER, max(limit // 4, 1)), limit)
        over = min(max(item.completion_tokens - (limit - buffer), 0), buffer)
        reason = f"{item.completion_tokens} of {limit} tokens, {over} of them in the buffer of {buffer}"
        return Verdict(-parameters.penalty * over / buffer, reward_pb2.OUTCOME_UNJUDGED, reason)
