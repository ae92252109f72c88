"""How a mixture of experts distributes its tokens, counted in the passes that are trained on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quartet_trainer.learner.attention import base_output, trunk
from quartet_trainer.learner.checks import no_experts
from quartet_weights.routed_experts import RecordExperts, ReplayExperts, Routing


def routing_of(causal_lm: PreTrainedModel) -> Routing:
    """Return the routing of a model. Raises LearnerError if it has no experts that can be replayed."""
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(causal_lm.parameters()).device)
    routing = Routing.of(causal_lm.config, trunk(causal_lm), lambda: base_output(trunk(causal_lm), tokens, None))
    if routing is None:
        raise no_experts(causal_lm.config.model_type)
    return routing


class RouterStatistics:
    """Counts, over a step's tokens, how often each layer uses each expert."""

    def __init__(self, routing: Routing, device: torch.device) -> None:
        self.routing = routing
        self.counts = True
        """False for a micro-batch that another pass, or another rank, counts."""
        self._sums = torch.zeros(len(routing.layers), routing.experts + 2, dtype=torch.float64, device=device)
        self._replays = False

    @classmethod
    def of(cls, causal_lm: PreTrainedModel, device: torch.device) -> RouterStatistics | None:
        """Statistics of a model, kept on `device`; None if its experts are not chosen by `torch.topk`, once in each
        layer for which transformers returns router logits."""
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=next(causal_lm.parameters()).device)
        outputs: list[Any] = []

        def forward() -> None:
            outputs.append(base_output(trunk(causal_lm), tokens, None, output_router_logits=True))

        routing = Routing.of(causal_lm.config, trunk(causal_lm), forward)
        if routing is None:
            return None
        sizes = [one.numel() for one in getattr(outputs[0], "router_logits", None) or ()]
        return cls(routing, device) if sizes == [tokens.numel() * routing.experts] * len(routing.layers) else None

    @torch.no_grad()
    def add(self, router_logits: tuple[Tensor, ...], places: Tensor, ran: RecordExperts | ReplayExperts) -> None:
        """Count the tokens of a forward pass.

        Args:
            router_logits: of each layer with experts, float for all positions, [M, L, experts] or [M * L, experts].
            places: int64 [t]: which of the M * L positions count.
            ran: the context of the pass: a record, for the routers' own choice may be of biased scores; or a replay.
        """
        self._replays = isinstance(ran, ReplayExperts)
        for layer, (sums, logits) in enumerate(zip(self._sums, router_logits, strict=True)):
            chosen_from = logits.reshape(-1, logits.shape[-1])[places].float()
            experts, own = ran.choices(layer, places)
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
            "router_entropy": (entropies * self.routing.chosen / total).mean().item() / math.log(experts),
        }
