"""LowLevelZeroPlugin: every rank holds the model, and a part of the optimizer's state (and in stage 2, gradients)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_trainer.learner.distributed import Ranks
from quartet_trainer.learner.plugins.base import (
    CreateOptimizer,
    Plugin,
    clip_parts,
)
from quartet_trainer.learner_settings import LearnerSettings


class ZeroRows:
    """Rows of tensors: a tensor is flattened, padded to a multiple of the ranks, and divided into one row per rank."""

    def __init__(
        self, optimizer: LowLevelZeroOptimizer, group: dist.ProcessGroup, device: torch.device, *, partitions: bool
    ) -> None:
        """`device` is where the ranks of `group` exchange rows, which the optimizer may keep elsewhere.

        `partitions`: whether it is stage 2, in which a rank keeps its own rows of gradients only.
        """
        self._device = device
        self._optimizer = optimizer
        self._group = group
        self._partitions = partitions
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with this rank's row of its reduced gradient. Local."""
        for group, parameters in self._optimizer._working_param_groups.items():
            for parameter in parameters:
                rows = self._optimizer.get_partitioned_gradients_by_param_id(group, id(parameter))
                if rows:
                    yield parameter, rows[0 if self._partitions else self._rank]

    def master(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's row, in float32, that this rank's optimizer updates; itself if it is frozen. Local."""
        return self._optimizer.working_to_master_param.get(id(parameter), parameter)

    def row(self, tensor: Tensor) -> Tensor:
        """This rank's row of a tensor. Local."""
        flat = tensor.reshape(-1)
        length = -(-flat.numel() // self._size)
        flat = torch.nn.functional.pad(flat, (0, length * self._size - flat.numel()))
        return flat.narrow(0, self._rank * length, length)

    def join(self, row: Tensor, shape: torch.Size) -> Tensor:
        """Gather a tensor of that shape from the rows of all ranks of the group, which all call."""
        mine = row.detach().to(self._device).contiguous()
        rows = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(rows, mine, group=self._group)
        return torch.cat(rows)[: shape.numel()].view(shape)


class LowLevelZero(Plugin):
    """Each rank updates a row of every tensor, see `ZeroRows`.

    Stage 1 reduces gradients in the last micro-batch's backward pass, stage 2 in each. With stage 2 all ranks take as
    many micro-batches as the one with most, and the added ones have no weight.
    """

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        bf16 = settings.precision == "bf16"
        zero = LowLevelZeroPlugin(
            stage=settings.zero_stage or 1,
            precision="bf16" if bf16 else "fp32",  # fp32 leaves the weights in the dtype they are loaded in
            cast_inputs=False,  # would round temperatures
            cpu_offload=settings.offload_optimizer,
            overlap_communication=ranks.device.type == "cuda",
            max_norm=0.0,  # clip_gradient does it, before it is known whether the step is taken
        )
        super().__init__(settings, ranks, Booster(plugin=zero))
        self._partitions = settings.zero_stage == 2

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        # With it, the plugin would expect a PEFT model and add its parameters to the optimizer, which has them already.
        self.booster.plugin.lora_enabled = False
        policy = self._policy(causal_lm)
        self.causal_lm = causal_lm
        self.model, self.optimizer, *_ = self.booster.boost(policy, create_optimizer(policy))
        self._rows = ZeroRows(self.optimizer, dist.group.WORLD, self.ranks.device, partitions=self._partitions)

    def sync_reference(self) -> None:
        self.model._force_wait_all_gather()
        super().sync_reference()

    def _rounds(self, count: int) -> int:
        return self._most(count) if self._partitions else count

    def _exchange(self, last: bool) -> AbstractContextManager:
        return super()._exchange(last or self._partitions)

    def clip_gradient(self, max_norm: float) -> float:
        return clip_parts([(row, 1.0) for _, row in self._rows.gradients()], max_norm, self.ranks.device)

    def trained(self, parameter: nn.Parameter) -> Tensor:
        return self._rows.master(parameter)

    def piece(self, name: str, whole: Tensor) -> Tensor:
        return whole if name in self.frozen else self._rows.row(whole)

    def whole(self, parameter: nn.Parameter, piece: Tensor) -> Tensor:
        return self._rows.join(piece, parameter.shape)

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        for held, parameter in self.parameters():
            if held == name:
                parameter.copy_(whole)
                self.trained(parameter).copy_(self.piece(name, whole))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        self.model._force_wait_all_gather()
        for name, parameter in self.parameters():
            trained = self.trained(parameter)
            yield name, trained.detach() if name in self.frozen else self._rows.join(trained, parameter.shape)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        states: dict[Tensor, dict[str, Any]] = self.optimizer.unwrap().state
        for name, parameter in self.parameters():
            for moment, value in states.get(self.trained(parameter), {}).items():
                whole = value.detach() if value.ndim == 0 else self._rows.join(value, parameter.shape)
                yield f"{moment}/{name}", whole
