"""What torch_fsdp and gemini share: a rank holds a range of each tensor's elements, and every pass is collective."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quartet_trainer.batch import MicroBatch
from quartet_trainer.learner.plugins.base import Plugin, clip_parts


class Ranged(Plugin):
    """Each rank holds a range of every flattened tensor: all, some or none of it. Ranges are in the order of ranks.

    Gradients are reduced with each micro-batch, so that no rank keeps whole gradients. Every forward pass is
    collective, so all ranks take as many micro-batches as the one with most; the added ones have no weight.
    """

    _reference_is_spread = True
    _held: dict[str, nn.Parameter]
    """By name, the optimizer's parameter for each tensor of which this rank holds a part."""
    _ranges: dict[str, list[tuple[int, int]]]
    """By name, start and length of every rank's range of the flattened tensor."""

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """This rank's part of the gradient, in any order, without padding. Local."""

    @abstractmethod
    def _weight(self, name: str) -> Tensor:
        """This rank's range of a tensor in `_held`, in the optimizer's precision. Local."""

    def _share_ranges(self, lengths: Mapping[str, int]) -> None:
        """Exchange how many elements of each tensor each rank holds, by name in the order of `specs`."""
        mine = torch.tensor(list(lengths.values()), device=self.ranks.device)
        of_all = [torch.empty_like(mine) for _ in range(self.data_size)]
        dist.all_gather(of_all, mine)
        self._ranges = {}
        for name, of_ranks in zip(lengths, torch.stack(of_all, dim=1).tolist(), strict=True):
            starts = [sum(of_ranks[:rank]) for rank in range(self.data_size)]
            self._ranges[name] = list(zip(starts, of_ranks, strict=True))
            if sum(of_ranks) != self.specs[name].numel():
                raise ValueError(f"the ranks have {of_ranks} elements of {name}, which is {list(self.specs[name])}")

    def passes(self, count: int) -> int:
        return self._most(count)

    def _rounds(self, count: int) -> int:
        return self._most(count)

    def _exchange(self, last: bool) -> AbstractContextManager:
        return nullcontext()

    @torch.no_grad()
    def log_probs(self, micro_batch: MicroBatch) -> Tensor:
        return self._outputs(self.model, micro_batch)[0]

    @torch.no_grad()
    def reference_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        return self._outputs(self._reference, micro_batch)[0]

    def clip_gradient(self, max_norm: float) -> float:
        return clip_parts([(gradient, 1.0) for gradient in self._gradients()], max_norm, self.ranks.device)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._held.items()

    def piece(self, name: str, whole: Tensor) -> Tensor:
        return whole.reshape(-1).narrow(0, *self._ranges[name][self.data_rank])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.specs:
            yield name, self._whole(name, self._weight(name) if name in self._held else None)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """See `Plugin`. A rank that holds nothing of a tensor has no state of it: the step count is another rank's."""
        states: dict[nn.Parameter, dict[str, Any]] = self.optimizer.unwrap().state
        counts = [state["step"] for state in states.values() if state]
        step = torch.stack(counts).max() if counts else torch.zeros((), device=self.ranks.device)
        dist.all_reduce(step, op=dist.ReduceOp.MAX)
        if not step:
            return
        for name in self.specs:
            if name in self.frozen:
                continue
            state = states.get(self._held[name], {}) if name in self._held else {}
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{moment}/{name}", self._whole(name, state.get(moment))
            yield f"step/{name}", step.clone()

    def _whole(self, name: str, mine: Tensor | None) -> Tensor:
        """Gather a whole tensor: each rank broadcasts its range, `mine`."""
        whole = torch.empty(self.specs[name].numel(), dtype=self.dtype, device=self.ranks.device)
        if mine is not None:
            whole.narrow(0, *self._ranges[name][self.data_rank]).copy_(mine.detach().reshape(-1))
        for rank, (start, length) in enumerate(self._ranges[name]):
            if length:
                dist.broadcast(whole.narrow(0, start, length), src=rank)
        return whole.view(self.specs[name])
