"""Which pieces of a model a rank of `hybrid_parallel` holds, and how whole tensors are gathered from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Shards:
    """One rank's pieces of a model that is divided into stages, and in each stage its matrices along one dimension.

    A tensor that has its whole shape on this rank is the same on all tensor-parallel ranks. With tied embeddings, the
    first and the last stage both hold the matrix, under two names: both are mapped to the embedding's.
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
        """All ranks call.

        Args:
            parameters: this rank's parameters of the sharded model, with their names in it.
            specs: names and shapes of the whole model's tensors, or of its adapter's.
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
        self._device = self._parameters[0][1].device
        self._stage = dist.get_rank(pp_group)
        # Not all_gather_object, which unpickles what it receives.
        held = torch.tensor([name in self._held for name in specs], dtype=torch.uint8, device=self._device)
        of_stages = [torch.empty_like(held) for _ in range(dist.get_world_size(pp_group))]
        dist.all_gather(of_stages, held, group=pp_group)
        stages = torch.stack(of_stages).cpu()
        lacking = {name for name, count in zip(specs, stages.sum(0).tolist(), strict=True) if not count}
        if other := lacking | self._held.keys() - specs.keys():
            raise ValueError(f"the sharded model has other tensors: {sorted(other)}")
        self._owner = dict(zip(specs, stages.argmax(0).tolist(), strict=True))

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, each with the whole tensor's name."""
        yield from self._parameters

    def gradients(self) -> Iterator[tuple[str, nn.Parameter, float]]:
        """This rank's parameters, each with its share in the sum over all ranks of one pipeline: below 1 if several
        ranks hold the same."""
        for name, parameter in self._parameters:
            first = self._owner[name] == self._stage
            yield name, parameter, (1.0 / self._tp_size if self._axis(name) is None else 1.0) if first else 0.0

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        dimension = self._axis(name)
        if dimension is None:
            return whole
        length = self._held[name].shape[dimension]
        return whole.narrow(dimension, self._tp_rank * length, length)

    def whole(self, name: str, of: Callable[[nn.Parameter], Tensor], dtype: torch.dtype) -> Tensor:
        """Gather a whole tensor on every rank. All ranks call, for the same name.

        Args:
            name: its name.
            of: returns the piece for this rank's parameter: itself, or a tensor of the same shape.
            dtype: of the pieces.
        """
        owner = self._owner[name]
        if owner == self._stage:
            tensor = of(self._held[name])
            dimension = self._axis(name)
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

    def _axis(self, name: str) -> int | None:
        """The dimension along which a tensor of this rank is sharded; None if it is whole."""
        here, whole = self._held[name].shape, self._specs[name]
        return next((dimension for dimension in range(len(whole)) if here[dimension] != whole[dimension]), None)
