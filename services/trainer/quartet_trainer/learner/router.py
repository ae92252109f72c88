"""How a mixture of experts shares out its tokens, seen in the passes that are trained on."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quartet_trainer.learner.attention import base_output, trunk

_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")
"""Keys of config.json: experts that each token goes to."""


class RouterStatistics:
    """Counts, over a step's tokens, how often each layer's router ranks each expert among a token's chosen."""

    def __init__(self, layers: int, experts: int, chosen: int, device: torch.device) -> None:
        """`chosen`: experts that a token goes to in a layer."""
        self._chosen = chosen
        self._sums = torch.zeros(layers, experts + 1, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, causal_lm: PreTrainedModel, device: torch.device) -> RouterStatistics | None:
        """Those of a model, which collects them on `device`; None if transformers shows no router's logits for it."""
        chosen = next((n for key in _PER_TOKEN if (n := getattr(causal_lm.config, key, None))), 0)
        if not chosen:
            return None
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(causal_lm.parameters()).device)
        with torch.no_grad():
            output = base_output(trunk(causal_lm), tokens, None, output_router_logits=True)
        logits = getattr(output, "router_logits", None)
        if not logits or any(one.numel() != tokens.numel() * logits[0].shape[-1] for one in logits):
            return None
        return cls(len(logits), logits[0].shape[-1], chosen, device)

    @torch.no_grad()
    def add(self, router_logits: tuple[Tensor, ...], places: Tensor) -> None:
        """Count in the tokens of a pass.

        Args:
            router_logits: of each layer with experts, float of all positions, [M, L, experts] or [M * L, experts].
            places: int64 [t]: which of the M * L positions count.
        """
        for sums, logits in zip(self._sums, router_logits, strict=True):
            chosen_from = logits.reshape(-1, logits.shape[-1])[places].float()
            experts = chosen_from.topk(self._chosen, dim=-1).indices.flatten()
            sums[:-1] += torch.bincount(experts, minlength=logits.shape[-1])
            distribution = chosen_from.log_softmax(-1)
            sums[-1] -= (distribution.exp() * distribution).sum()

    def take(self) -> Tensor:
        """float64 [layers, experts + 1]: each expert's tokens, and the sum of the tokens' entropies; then forgets."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The metrics of the sums over all ranks, means over layers; none where no token was counted."""
        loads, entropies = sums[:, :-1], sums[:, -1]
        total = loads.sum(-1)
        if not total.all():
            return {}
        experts = loads.shape[-1]
        return {
            "router_load_max": (loads.amax(-1) * experts / total).mean().item(),
            "router_idle_experts": (loads == 0).double().mean().item(),
            "router_entropy": (entropies * self._chosen / total).mean().item() / math.log(experts),
        }
