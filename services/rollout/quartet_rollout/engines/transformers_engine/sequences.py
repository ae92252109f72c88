"""Unfinished completions."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field

import numpy as np
import torch

from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    FinishReason,
    SamplingSettings,
    version_spans,
)
from quartet_rollout.engines.masks import join


@dataclass(eq=False)
class EngineSequence:
    """One completion, a row of the batch."""

    number: int
    """Number of its request."""
    index: int
    """Index in its request."""
    prompt: list[int]
    sampling: SamplingSettings
    policy_version: InitVar[int] = UNKNOWN_VERSION
    generator: torch.Generator | None = None
    """Only with a seed."""
    limit: int = 0
    """Most tokens of `output`."""
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)
    """Of each token, if `masked`; see `masks.candidates`."""
    experts: list[np.ndarray] = field(default_factory=list)
    """Of the tokens computed so far, with `routed_experts`; [tokens, hidden layers, experts per token] each."""
    versions: list[tuple[int, int]] = field(init=False)
    """(policy version, first token), oldest first."""
    masked: bool = field(init=False)
    """Whether `candidates` are recorded."""

    def __post_init__(self, policy_version: int) -> None:
        self.versions = [(policy_version, 0)]
        self.masked = self.sampling.masked

    def length(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.prompt) + len(self.output)

    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt + self.output

    def completion(self, reason: FinishReason) -> EngineCompletion:
        """Return the completion in its current state."""
        return EngineCompletion(
            index=self.index,
            token_ids=np.array(self.output, dtype=np.int32),
            log_probs=np.array(self.log_probs, dtype=np.float32),
            finish_reason=reason,
            version_spans=version_spans(self.versions, len(self.output)),
            mask=join(self.candidates) if self.masked else None,
            routed_experts=np.concatenate(self.experts) if self.experts else None,
        )
