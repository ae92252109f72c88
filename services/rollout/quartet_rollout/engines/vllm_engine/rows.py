"""Completions inside vLLM: what has been generated of each, from the outputs of its engine core.

vLLM's own output processor makes texts, ranks and an object for each token of each request; what is needed here is the
token and its log-prob. With a small model that is a tenth of the time of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quartet_rollout.engines.base import FinishReason, SamplingMask
from quartet_rollout.engines.core import CoreCompletion

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput


class Row:
    """One completion."""

    __slots__ = ("key", "log_probs", "masked", "texts", "tokens")

    def __init__(self, key: str, masked: bool, texts: Any) -> None:
        """`texts`: vLLM's incremental detokenizer, which looks for stop strings; None where there are none."""
        self.key, self.masked, self.texts = key, masked, texts
        self.tokens: list[int] = []
        self.log_probs: list[float] = []

    def take(self, output: EngineCoreOutput) -> FinishReason | None:
        """Add what the engine core says; return why the completion ends with it, if it does."""
        tokens = output.new_token_ids
        self.tokens += tokens
        if (log_probs := output.new_logprobs) is not None:
            # [tokens, 1]: the sampled token's, as no alternatives are asked for.
            self.log_probs += log_probs.logprobs[:, 0].tolist()
        if output.finish_reason is not None:
            # vLLM also says "error" of completions that it gave up itself.
            reason = str(output.finish_reason)
            return reason if reason in ("stop", "length") else "abort"  # type: ignore[return-value]
        if self.texts is not None and self.texts.update(tokens, False):
            return "stop"
        return None

    def completion(self, reason: FinishReason, mask: SamplingMask | None = None) -> CoreCompletion:
        """It has ended."""
        tokens = np.array(self.tokens, dtype=np.int32)
        return CoreCompletion(self.key, tokens, np.array(self.log_probs, dtype=np.float32), reason, mask)
