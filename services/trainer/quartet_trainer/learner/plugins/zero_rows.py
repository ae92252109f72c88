"""ZeRO's rows: what one rank's optimizer holds of a tensor that all ranks of a group have."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import Tensor, nn


class ZeroRows:
    """A row is the tensor flattened, padded to a multiple of the group's ranks, and cut in the order of the ranks."""

    def __init__(
        self, optimizer: LowLevelZeroOptimizer, group: dist.ProcessGroup, device: torch.device, *, partitions: bool
    ) -> None:
        """Take ZeRO's optimizer over `group`, whose ranks exchange on `device`, wherever the optimizer's rows are.

        `partitions`: it is stage 2, which keeps this rank's gradients only.
        """
        self._device = device
        self._optimizer = optimizer
        self._group = group
        self._partitions = partitions
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and the row of its exchanged gradient that this rank will step with. Local."""
        for group, parameters in self._optimizer._working_param_groups.items():
            for parameter in parameters:
                rows = self._optimizer.get_partitioned_gradients_by_param_id(group, id(parameter))
                if rows:
                    yield parameter, rows[0 if self._partitions else self._rank]

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The row of the parameter, in float32, that the optimizer updates. Local."""
        return self._optimizer.working_to_master_param[id(parameter)]

    def row(self, tensor: Tensor) -> Tensor:
        """This rank's row of a tensor. Local."""
        flat = tensor.reshape(-1)
        length = -(-flat.numel() // self._size)
        flat = torch.nn.functional.pad(flat, (0, length * self._size - flat.numel()))
        return flat.narrow(0, self._rank * length, length)

    def join(self, row: Tensor, shape: torch.Size) -> Tensor:
        """The tensor of that shape, from the rows of all ranks of the group. All of them call."""
        mine = row.detach().to(self._device).contiguous()
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(rows, mine, group=self._group)
        return torch.cat(rows)[: shape.numel()].view(shape)
