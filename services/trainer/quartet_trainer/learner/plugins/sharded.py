"""What a rank of `hybrid_parallel` keeps of weights, gradients and moments, and how whole tensors are made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from quartet_trainer.learner.adapter import Adapter, merge
from quartet_trainer.learner.plugins.base import Plugin
from quartet_trainer.learner.plugins.numerics import clip_parts
from quartet_trainer.learner.plugins.shards import Shards
from quartet_trainer.learner.plugins.zero_rows import ZeroRows


class Sharded(Plugin):
    """A plugin whose rank has pieces of tensors, and with ZeRO steps with a row of each piece only."""

    _shards: Shards
    _model_shards: Shards
    """With an adapter only: of the model that it is in."""
    _layers: dict[int, LoraLayer | None]
    """With an adapter only: the layer whose adapter belongs to a parameter of the model, by the parameter's id."""
    _rows: ZeroRows | None = None
    """With ZeRO only."""
    _half = False
    """Whether the model is in bf16, and the optimizer has copies in float32."""
    _holders: tuple[dist.ProcessGroup, ...]
    """Along each of these groups the ranks step with different parts of the model: the sum over all is the whole."""

    def _find_shards(self, adapter: Adapter | None, tied: bool, **groups: dist.ProcessGroup) -> None:
        """Note what this rank has of `causal_lm`; see `Shards`."""
        if adapter is None:
            self._shards = Shards(self.causal_lm.named_parameters(), self.specs, tied, **groups)
            return
        self._shards = Shards(adapter.parameters(), self.specs, tied, **groups)
        held = list(adapter.model_parameters())
        self._model_shards = Shards([(name, p) for name, p, _ in held], self.model_specs, tied, **groups)
        self._layers = {id(parameter): layer for _, parameter, layer in held}

    def clip_gradient(self, max_norm: float) -> float:
        return clip_parts(self._gradients(), max_norm, self.ranks.device, self._holders)

    def _gradients(self) -> list[tuple[Tensor, float]]:
        """What this rank steps with, and the share of each in the sum over all ranks that hold a part of the model."""
        if self._rows is None:
            return [(p.grad, owned) for _, p, owned in self._shards.gradients() if p.grad is not None]
        rows = {id(parameter): row for parameter, row in self._rows.gradients()}
        return [(rows[id(p)], owned) for _, p, owned in self._shards.gradients() if id(p) in rows]

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._shards.parameters()

    def piece(self, name: str, whole: Tensor) -> Tensor:
        piece = self._shards.piece(name, whole)
        return self._rows.row(piece) if self._rows else piece

    def trained(self, parameter: nn.Parameter) -> Tensor:
        if self._rows:
            return self._rows.master(parameter)
        return self.optimizer.get_working_to_master_map()[id(parameter)] if self._half else parameter

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        for held, parameter in self.parameters():
            if held == name:
                parameter.copy_(self._shards.piece(name, whole))
                self.trained(parameter).copy_(self.piece(name, whole))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.specs:
            yield name, self._whole(name, self.trained)

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        if self.adapter is None:
            yield from self.weights()
            return
        dtype = next(self.causal_lm.parameters()).dtype
        for name in self.model_specs:
            yield name, self._model_shards.whole(name, lambda p: merge(p, self._layers[id(p)]), dtype)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        states: dict[Tensor, dict[str, Any]] = self.optimizer.unwrap().state
        if not states:
            return
        step = next(iter(states.values()))["step"].detach()

        def held(moment: str) -> Callable[[nn.Parameter], Tensor]:
            return lambda parameter: states[self.trained(parameter)][moment]

        for name in self.specs:
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{moment}/{name}", self._whole(name, held(moment))
            yield f"step/{name}", step.clone()

    def _whole(self, name: str, kept: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """A whole tensor from what the ranks' optimizers hold of it, each the `kept` of its parameter."""
        rows = self._rows
        if rows is None:
            return self._shards.whole(name, lambda p: kept(p).detach(), self.dtype)
        # ZeRO keeps float32, whatever the model is in.
        return self._shards.whole(name, lambda p: rows.join(kept(p), p.shape), torch.float32)
