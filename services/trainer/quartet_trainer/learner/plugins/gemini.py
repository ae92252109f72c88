"""GeminiPlugin: every rank holds a part of each chunk of tensors, and gathers a chunk while it is in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin
from colossalai.zero.gemini import gemini_optimizer
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_trainer.batch import MicroBatch
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.distributed import Ranks, in_turn
from quartet_trainer.learner.model import Policy, without_weights
from quartet_trainer.learner.plugins.base import CreateOptimizer, exact_buffers
from quartet_trainer.learner.plugins.ranged import Ranged
from quartet_trainer.learner_settings import LearnerSettings

CHUNK_ELEMENTS = 32 << 20
"""Minimum size of a chunk. A model with fewer than eight such chunks is divided into eight."""


class ScaledAdamW(torch.optim.AdamW):
    """torch's AdamW with the interface of Gemini's optimizers: gradients are in bf16, and divided by `div_scale`."""

    def step(self, closure: Callable[[], Any] | None = None, div_scale: float = -1.0) -> Any:
        """Convert gradients to float32 like the weights, divide them by `div_scale` if it is above 0, and step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to(parameter.dtype)
                    if div_scale > 0:
                        parameter.grad.div_(div_scale)
        return super().step(closure)


# Gemini checks the type. Its own optimizers would have to compile kernels on the trainer's machine.
gemini_optimizer._AVAIL_OPTIM_LIST.add(ScaledAdamW)


class _Shell(nn.Module):
    """Passes inputs by an attribute: Gemini would round a forward's arguments, such as temperatures, to bf16."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.inputs: tuple[Tensor, ...] = ()

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.policy(*self.inputs)


class Gemini(Ranged):
    """Tensors are packed into chunks of equal size; each rank holds an equal part of every chunk.

    The model, the gradients and their sum over micro-batches are in bf16; the optimizer has float32 weights. Each
    parameter of the optimizer is a placeholder for a range, empty between steps.
    """

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        super().__init__(settings, ranks, Booster())  # _boost replaces it, for the plugin depends on the model's sizes

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        own = (m for m in causal_lm.modules() if not isinstance(m, nn.Conv1d))
        if any(parameter.ndim > 2 for module in own for parameter in module.parameters(recurse=False)):
            raise LearnerError(
                f"plugin 'gemini' does not gather the stacked experts of a {causal_lm.config.model_type!r} model; use "
                "plugin 'torch_fsdp' or 'low_level_zero'"
            )
        elements = sum(parameter.numel() for parameter in causal_lm.parameters())
        chunk = min(CHUNK_ELEMENTS, elements / 8) / 2**20
        cuda = self.ranks.device.type == "cuda"
        gemini = GeminiPlugin(
            precision="bf16",
            placement_policy="static",
            offload_optim_frac=float(self.settings.offload_optimizer),
            enable_gradient_accumulation=True,
            enable_async_reduce=cuda,
            pin_memory=cuda,
            hidden_dim=causal_lm.config.hidden_size,
            min_chunk_size_m=chunk,  # a smaller model would be kept whole on every rank
            search_range_m=chunk,
            max_norm=0.0,  # clip_gradient does it, before it is known whether the step is taken
        )
        self.booster = Booster(plugin=gemini)
        names = {id(parameter): name for name, parameter in causal_lm.named_parameters()}
        shell = _Shell(self._policy(causal_lm))
        groups = create_optimizer(shell).param_groups
        self.causal_lm = causal_lm
        self.model, self.optimizer, *_ = self.booster.boost(shell, ScaledAdamW(groups))
        real, held = self.optimizer.id_to_real_params, self.optimizer.id_to_fake_params
        by_name = {names[id(parameter)]: held.get(number) for number, parameter in real.items()}
        self._held = {name: by_name[name] for name in self.specs if by_name[name] is not None}
        self._share_ranges({name: self._length(by_name[name]) for name in self.specs})

    def _length(self, held: nn.Parameter | None) -> int:
        if held is None:
            return 0
        begin, end = self.optimizer.param_to_range[held]
        return end - begin

    @torch.no_grad()
    def keep_reference(self, load: Callable[[], PreTrainedModel], *, other: bool = False) -> None:
        """See `Plugin`. The reference is spread like the policy, in its own chunks."""
        with in_turn(self.ranks):
            shell = _Shell(Policy(without_weights(load().eval())))
        with exact_buffers(shell):
            self._reference, *_ = self.booster.boost(shell)
        self.sync_reference()

    def _policy_and_reference(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        own, kept = ([chunk.payload for chunk in self._chunks(model)] for model in (self.model, self._reference))
        return own, kept

    def _chunks(self, model: nn.Module) -> list[Any]:
        """The chunks of a boosted model, in order."""
        return list(dict.fromkeys(map(model.chunk_manager.get_chunk, model.fp16_params)))

    def _outputs(self, model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        model.module.inputs = micro_batch.inputs
        return model()

    def accumulate(self, *arguments: Any) -> Any:
        # Discard the gradient that a skipped step has left.
        self.model.chunk_manager.accumulating_grads = False
        return super().accumulate(*arguments)

    def _gradients(self) -> list[Tensor]:
        chunks = dict.fromkeys(self.optimizer.param_to_chunk16[held] for held in self._held.values())
        return [chunk.grad_chunk.payload[: chunk.get_valid_length()] for chunk in chunks]

    def _range_in(self, name: str, *, trained: bool) -> Tensor:
        """This rank's range of a tensor: `trained`, the optimizer's in float32; otherwise the model's in bf16."""
        held = self._held[name]
        begin, end = self.optimizer.param_to_range[held]
        chunk = self.optimizer.param_to_chunk16[held]
        return (chunk.paired_chunk if trained else chunk).payload[begin:end]

    def _weight(self, name: str) -> Tensor:
        return self._range_in(name, trained=True)

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        if name in self._held:
            for trained in (True, False):
                self._range_in(name, trained=trained).copy_(self.piece(name, whole))
