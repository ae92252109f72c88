"""How a mixture of experts distributes its tokens, counted in the passes that are trained on."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quartet_common.model_folder import EXPERTS_OF_TOKEN, set_number
from quartet_trainer.learner.attention import base_output, trunk
from quartet_trainer.learner.checks import no_experts
from quartet_weights.routed_experts import ReplayExperts, Routing


def routing_of(causal_lm: PreTrainedModel) -> Routing:
    """Return the routing of a model. Raises LearnerError if it has no experts that can be replayed."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(causal_lm.parameters()).device)
    routing = Routing.of(causal_lm.config, trunk(causal_lm), lambda: base_output(trunk(causal_lm), tokens, None))
    if routing is None:
        raise no_experts(causal_lm.config.model_type)
    return routing


class RouterStatistics:
    """Counts, over a step's tokens, how often each layer's router chooses each expert."""

    def __init__(self, layers: int, experts: int, chosen: int, device: torch.device) -> None:
        """`chosen`: experts per token in a layer."""
        self._chosen = chosen
        self._sums = torch.zeros(layers, experts + 2, dtype=torch.float64, device=device)
        self._replays = False

    @classmethod
    def of(cls, causal_lm: PreTrainedModel, device: torch.device) -> RouterStatistics | None:
        """Statistics of a model, kept on `device`; None if transformers returns no router logits for it."""
        chosen = set_number(causal_lm.config, EXPERTS_OF_TOKEN)
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
    def add(self, router_logits: tuple[Tensor, ...], places: Tensor, replay: ReplayExperts | None = None) -> None:
        """Count the tokens of a forward pass.

        Args:
            router_logits: of each layer with experts, float for all positions, [M, L, experts] or [M * L, experts].
            places: int64 [t]: which of the M * L positions count.
            replay: the replay that the pass ran under, if any.
        """
        for layer, (sums, logits) in enumerate(zip(self._sums, router_logits, strict=True)):
            chosen_from = logits.reshape(-1, logits.shape[-1])[places].float()
            experts = chosen_from.topk(self._chosen, dim=-1).indices
            if replay is not None:
                self._replays = True
                experts, own = replay.choices(layer, places)
                sums[-1] += (experts[:, :, None] != own[:, None, :]).all(-1).sum()
            sums[:-2] += torch.bincount(experts.flatten(), minlength=logits.shape[-1])
            distribution = chosen_from.log_softmax(-1)
            sums[-2] -= (distribution.exp() * distribution).sum()

    def take(self) -> Tensor:
        """Return and reset the sums, float64 [layers, experts + 2]: each expert's tokens, the sum of the tokens'
        entropies, and the replayed experts that the router would not have chosen."""
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        return sums

    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The metrics, means over layers, from the sums over all ranks; empty if no token was counted."""
        loads, entropies, disagreeing = sums[:, :-2], sums[:, -2], sums[:, -1]
        total = loads.sum(-1)
        if not total.all():
            return {}
        experts = loads.shape[-1]
        replayed = {"router_disagreement": (disagreeing / total).mean().item()} if self._replays else {}
        return {
            **replayed,
            "router_load_max": (loads.amax(-1) * experts / total).mean().item(),
            "router_idle_experts": (loads == 0).double().mean().item(),
            "router_entropy": (entropies * self._chosen / total).mean().item() / math.log(experts),
        }
