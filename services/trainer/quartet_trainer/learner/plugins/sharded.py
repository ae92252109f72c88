"""What a rank of `hybrid_parallel` keeps of weights, gradients and moments, and how whole tensors are made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from quartet_trainer.learner.lora import Adapter, merge
from quartet_trainer.learner.plugins.base import Plugin, clip_parts
from quartet_trainer.learner.plugins.zero import ZeroRows


class Shards:
    """One rank's pieces of a model that is cut into stages, and each stage's matrices along one dimension.

    A tensor whose shape here is the whole one's is alike on all tensor-parallel ranks. With tied embeddings, the first
    and the last stage both hold the one matrix, under two names: both stand for the embedding's.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        specs: Mapping[str, torch.Size],
        tied: bool,
        *,
        tp_group: dist.ProcessGroup,
        pp_group: dist.ProcessGroup,
    ) -> None:
        """Take what this rank has of a model that was sharded. All ranks call.

        Args:
            parameters: this rank's, by the names that they have here.
            specs: names and shapes of the whole model's, or of its adapter's.
            tied: whether the head's matrix is the embedding's.
            tp_group, pp_group: the tensor-parallel ranks of this stage, and the stages of this pipeline.
        """
        self._specs = specs
        self._tp_group, self._pp_group = tp_group, pp_group
        self._tp_rank, self._tp_size = dist.get_rank(tp_group), dist.get_world_size(tp_group)
        embedding = next((name for name in specs if name.endswith("embed_tokens.weight")), "")
        self._parameters = [
            (embedding if tied and name not in specs else name, parameter) for name, parameter in parameters
        ]
        self._held = dict(reversed(self._parameters))
        names_by_stage: list[list[str]] = [[] for _ in range(dist.get_world_size(pp_group))]
        dist.all_gather_object(names_by_stage, list(self._held), group=pp_group)
        self._owner = {name: stage for stage, names in reversed(list(enumerate(names_by_stage))) for name in names}
        self._stage = dist.get_rank(pp_group)
        if self._owner.keys() != specs.keys():
            raise ValueError(f"the sharded model has other tensors: {sorted(self._owner.keys() ^ specs.keys())}")
        self._device = self._parameters[0][1].device

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the whole tensor's name."""
        yield from self._parameters

    def gradients(self) -> Iterator[tuple[str, nn.Parameter, float]]:
        """This rank's parameters, and the share of each in the sum over all ranks of one pipeline: 1, or less where
        others have the same."""
        for name, parameter in self._parameters:
            first = self._owner[name] == self._stage
            yield name, parameter, (1.0 / self._tp_size if self._cut(name) is None else 1.0) if first else 0.0

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        dimension = self._cut(name)
        if dimension is None:
            return whole
        length = self._held[name].shape[dimension]
        return whole.narrow(dimension, self._tp_rank * length, length)

    def whole(self, name: str, of: Callable[[nn.Parameter], Tensor], dtype: torch.dtype) -> Tensor:
        """A whole tensor from its pieces, on every rank. All ranks call, for the same name.

        Args:
            name: its name.
            of: from this rank's parameter to the piece: itself, or what is kept beside it in the same shape.
            dtype: the pieces'.
        """
        owner = self._owner[name]
        if owner == self._stage:
            tensor = of(self._held[name])
            dimension = self._cut(name)
            if dimension is not None:
                pieces = [torch.empty_like(tensor) for _ in range(self._tp_size)]
                dist.all_gather(pieces, tensor.contiguous(), group=self._tp_group)
                tensor = torch.cat(pieces, dim=dimension)
            tensor = tensor.contiguous()
        else:
            tensor = torch.empty(self._specs[name], dtype=dtype, device=self._device)
        if dist.get_world_size(self._pp_group) > 1:
            dist.broadcast(tensor, src=dist.get_global_rank(self._pp_group, owner), group=self._pp_group)
        return tensor

    def _cut(self, name: str) -> int | None:
        """The dimension along which a tensor of this rank is cut."""
        here, whole = self._held[name].shape, self._specs[name]
        return next((dimension for dimension in range(len(whole)) if here[dimension] != whole[dimension]), None)


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
