"""The verifier `reward_model`: clip(scale · logit + shift) of a learned reward model."""

import math

from pydantic import Field, model_validator
from quartet.v1 import reward_pb2

from quartet_reward.answer_extraction import SPECIAL_TOKENS, without_trailing_special_tokens
from quartet_reward.errors import InvalidItem, VerifierCrashed
from quartet_reward.verifiers.base import Parameters, SpecialTokens, Tools, Verdict


class RewardModelParameters(Parameters):
    scale: float = Field(1.0, description="Factor of the logit.")
    shift: float = Field(0.0, description="Added after the scaling.")
    clip_low: float | None = Field(None, description="Lower bound of the reward; none: no bound.")
    clip_high: float | None = Field(None, description="Upper bound of the reward; none: no bound.")
    label: int = Field(0, ge=0, description="Index of the logit, from 0.")
    keep_special_tokens: bool = Field(
        True, description="Keep the special tokens at the completion's end, as models trained on whole chats expect."
    )
    special_tokens: SpecialTokens = Field(
        list(SPECIAL_TOKENS), description="Tokens that are dropped from the end if keep_special_tokens is false."
    )

    @model_validator(mode="after")
    def _ordered(self) -> "RewardModelParameters":
        low, high = self.clip_low, self.clip_high
        if low is not None and high is not None and low > high:
            raise ValueError(f"clip_low {low:g} is above clip_high {high:g}")
        return self


class RewardModelVerifier:
    """Judges neither form nor answers, and needs no reference."""

    name = "reward_model"
    description = "A learned reward model's logit, scaled and clipped. The service must have one configured."
    parameters = RewardModelParameters
    reads = ()

    async def verify(self, item: reward_pb2.ScoreItem, parameters: RewardModelParameters, tools: Tools) -> Verdict:
        model = tools.reward_model
        if model is None:
            raise InvalidItem("this reward service has no reward model: set reward.reward_model.path")
        if "{prompt}" in model.template and not item.prompt:
            raise InvalidItem("item.prompt: got nothing; 'reward_model' needs the prompt's text")
        completion = item.completion
        if not parameters.keep_special_tokens:
            completion = without_trailing_special_tokens(completion, parameters.special_tokens)
        # Split first, so that "{completion}" in the prompt's own text is not replaced.
        before, _, after = model.template.partition("{completion}")
        text = before.replace("{prompt}", item.prompt) + completion + after.replace("{prompt}", item.prompt)
        reading = await model.read(text)
        if parameters.label >= len(reading.logits):
            raise InvalidItem(f"parameters.label: got {parameters.label}; the model has {len(reading.logits)} logits")
        logit = reading.logits[parameters.label]
        if not math.isfinite(logit):
            raise VerifierCrashed(f"the reward model's logit is {logit}")
        reward = parameters.scale * logit + parameters.shift
        reward = reward if parameters.clip_low is None else max(reward, parameters.clip_low)
        reward = reward if parameters.clip_high is None else min(reward, parameters.clip_high)
        cut = f", the last of {reading.tokens + reading.cut}" if reading.cut else ""
        reason = f"logit {logit:.6g} of {reading.tokens} tokens{cut}"
        return Verdict(reward, reward_pb2.OUTCOME_UNJUDGED, reason)
