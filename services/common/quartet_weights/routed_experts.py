"""Routing of a mixture of experts: recorded in one forward pass, replayed in another.

A router takes the top k of its scores, so rounding errors can send a token to other experts in the trainer than in the
rollout, which changes its log-prob. With rollout routing replay (R3, arXiv:2510.11370) the trainer uses the rollout's
experts. The gates are still the trainer's own scores of those experts, so the router learns.

All model families of transformers choose by `torch.topk`, so that call is intercepted here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quartet_common.model_folder import EXPERTS, EXPERTS_OF_TOKEN, set_number


@dataclass(frozen=True)
class Routing:
    """A model's routers."""

    layers: tuple[int, ...]
    """The hidden layers with a router, ascending."""
    hidden_layers: int
    """Number of all hidden layers."""
    experts: int
    """Experts in a layer."""
    chosen: int
    """Experts per token in a layer."""
    calls: int = 1
    """Calls of `torch.topk` with these sizes in each layer; the last one chooses the experts. A router that chooses
    among groups of experts first may make one more, if it has a single group."""

    @classmethod
    def of(cls, config: Any, trunk: nn.Module, forward: Callable[[], object]) -> Routing | None:
        """Return a model's routing; None if it has no experts, or does not choose them by `torch.topk`.

        Args:
            config: transformers' configuration.
            trunk: the module that contains the hidden layers.
            forward: runs a forward pass of a few tokens, to observe the calls.
        """
        experts, chosen = set_number(config, EXPERTS), set_number(config, EXPERTS_OF_TOKEN)
        layers = set_number(config, ("num_hidden_layers",))
        stacks = [one for one in trunk.modules() if isinstance(one, nn.ModuleList) and len(one) == layers]
        if not (experts and chosen and stacks):
            return None
        begun: list[int] = []
        handles = [
            layer.register_forward_pre_hook(lambda *_, number=number: begun.append(number))
            for number, layer in enumerate(stacks[0])
        ]
        found: list[int] = []
        try:
            with torch.no_grad(), _TopK(experts, chosen, 1, lambda _: found.append(begun[-1]) if begun else None):
                forward()
        finally:
            for handle in handles:
                handle.remove()
        counts = Counter(found)
        if len(set(counts.values())) != 1:
            return None
        return cls(tuple(counts), layers, experts, chosen, calls=counts[found[0]])

    @property
    def dtype(self) -> torch.dtype:
        """Element type of recorded experts."""
        return torch.uint8 if self.experts <= 256 else torch.int32

    def record(self) -> RecordExperts:
        """Return a context manager that records one forward pass."""
        return RecordExperts(self)


class _TopK(TorchFunctionMode):
    """Intercepts `torch.topk` calls that choose `chosen` of `experts`, every `calls`-th of them: `choose` gets the
    scores [..., experts] and returns the indices [..., chosen] to use, or None for the call's own."""

    def __init__(self, experts: int, chosen: int, calls: int, choose: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self._of, self._chosen, self._choose = experts, chosen, choose
        self._calls, self._call = calls, 0

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in (torch.topk, Tensor.topk):
            scores, k = args[0], args[1] if len(args) > 1 else given["k"]
            if k == self._chosen and scores.shape[-1] == self._of:
                self._call += 1
                if self._call % self._calls == 0 and (indices := self._choose(scores)) is not None:
                    return torch.return_types.topk((scores.gather(-1, indices), indices))
        return func(*args, **given)


class RecordExperts(_TopK):
    """Context manager that records the experts that each router chooses."""

    def __init__(self, routing: Routing) -> None:
        super().__init__(routing.experts, routing.chosen, routing.calls, self._record)
        self._routing = routing
        self._found: list[Tensor] = []

    def _record(self, scores: Tensor) -> Tensor:
        indices = scores.detach().topk(self._routing.chosen, dim=-1).indices
        self._found.append(indices.reshape(-1, indices.shape[-1]))
        return indices

    def choices(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """As `ReplayExperts.choices`: the routers' own choice is what was used."""
        return self._found[layer][places], self._found[layer][places]

    def experts(self) -> Tensor:
        """Return the recorded experts: `Routing.dtype` [positions, hidden layers, chosen], 0 in layers without a
        router."""
        routing, positions = self._routing, len(self._found[0])
        experts = self._found[0].new_zeros(positions, routing.hidden_layers, routing.chosen, dtype=routing.dtype)
        experts[:, list(routing.layers)] = torch.stack(self._found, dim=1).to(routing.dtype)
        return experts


class ReplayExperts(_TopK):
    """Context manager in which each router uses given experts, for one forward pass."""

    _active: ClassVar[ReplayExperts | None] = None

    def __init__(self, routing: Routing, experts: Tensor, layer: int = 0) -> None:
        """`experts`: integers [positions, hidden layers, chosen]. `layer`: index, among the layers with a router, of
        the first one in the forward pass."""
        super().__init__(routing.experts, routing.chosen, routing.calls, self._replay)
        self._routing, self._experts, self._layer = routing, experts, layer
        self.own: list[Tensor] = []
        """For each layer, int64 [positions, chosen]: the experts that its router would have chosen."""

    def __enter__(self) -> ReplayExperts:
        self._before, ReplayExperts._active = ReplayExperts._active, self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        ReplayExperts._active = self._before
        super().__exit__(*error)

    def _replay(self, scores: Tensor) -> Tensor:
        own = scores.detach().topk(self._routing.chosen, dim=-1).indices
        self.own.append(own.reshape(-1, own.shape[-1]))
        given = self._experts[:, self._routing.layers[self._layer]].long()
        self._layer += 1
        return given.reshape(own.shape)

    def choices(self, layer: int, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts used for tokens, and those that the router would have chosen; int64 [t, chosen] each.

        Args:
            layer: index of a layer among those with a router.
            places: int64 [t]: positions of the tokens.
        """
        return self._experts[places, self._routing.layers[layer]].long(), self.own[layer][places]

    @classmethod
    def checkpoint_contexts(cls) -> tuple[AbstractContextManager, AbstractContextManager]:
        """`context_fn` of `torch.utils.checkpoint.checkpoint`: the recomputation replays the same experts."""
        active = cls._active
        again = nullcontext() if active is None else cls(active._routing, active._experts, active._layer)
        return nullcontext(), again
