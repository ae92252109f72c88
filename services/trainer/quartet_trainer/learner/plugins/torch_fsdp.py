"""TorchFSDPPlugin: every rank holds a part of each tensor, and gathers a layer for as long as it computes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchFSDPPlugin
from colossalai.booster.plugin.torch_fsdp_plugin import FSDPOptimizerWrapper
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import PreTrainedModel

from quartet_trainer.batches import MicroBatch
from quartet_trainer.learner.base import LearnerError
from quartet_trainer.learner.distributed import Ranks
from quartet_trainer.learner.plugins.base import CreateOptimizer, Criterion, Load, Plugin, Seconds
from quartet_trainer.learner.policy import Policy
from quartet_trainer.learner.settings import LearnerSettings


class _Shell(nn.Module):
    """The outermost module, without parameters of its own.

    FSDP leaves the outermost module's parameters gathered after a forward pass, for the backward pass that it expects.
    After one without gradient it would keep them, in memory and as they are, over the next change of the weights.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.policy(*inputs)


class TorchFsdp(Plugin):
    """A unit is one decoder layer; embedding, last norm and head together are another.

    A unit's tensors are flattened, put one after another and cut evenly, so what a rank holds of one of them is a range
    of its elements: all, some or none. Ranks hold the ranges in order. Gradients are exchanged with each micro-batch,
    as whole gradients on every rank are what FSDP is to save; every forward pass is collective, so all ranks take as
    many micro-batches as the one with most, and those added have no weight.
    """

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        precision = None
        if settings.precision == "bf16":
            # The weights are float32, gathered as bf16; temperatures keep their digits.
            precision = MixedPrecision(
                param_dtype=torch.bfloat16,
                reduce_dtype=torch.float32,
                cast_forward_inputs=False,
                cast_root_forward_inputs=False,
            )
        fsdp = TorchFSDPPlugin(mixed_precision=precision)
        fsdp.fsdp_kwargs["use_orig_params"] = True  # not among the plugin's arguments: parameters keep their names
        super().__init__(settings, ranks, Booster(plugin=fsdp))
        self._fsdp = fsdp
        self._reference: nn.Module | None = None

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        policy = Policy(causal_lm, entropy_gradient=self.settings.entropy_coefficient > 0)
        self.causal_lm = causal_lm
        self._parameters = dict(causal_lm.named_parameters())
        self._fsdp.fsdp_kwargs["auto_wrap_policy"] = ModuleWrapPolicy({Policy, *decoder_layers(causal_lm)})
        optimizer = create_optimizer(policy)
        # The plugin would start the optimizer anew, with one group and its own defaults, of which torch's AdamW refuses
        # one. There is no need: the parameters stay the same objects.
        self.model, *_ = self.booster.boost(_Shell(policy))
        self.optimizer = FSDPOptimizerWrapper(optimizer, self.model)
        self._ranges = self._all_ranges()

    def _all_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """For each name, where every rank's range of the flattened tensor begins, and its length."""
        mine = torch.tensor([p.numel() for p in self._parameters.values()], device=self.ranks.device)
        lengths = [torch.empty_like(mine) for _ in range(self.data_size)]
        dist.all_gather(lengths, mine)
        ranges = {}
        for name, of_ranks in zip(self._parameters, torch.stack(lengths, dim=1).tolist(), strict=True):
            starts = [sum(of_ranks[:rank]) for rank in range(self.data_size)]
            ranges[name] = list(zip(starts, of_ranks, strict=True))
            if sum(of_ranks) != self.specs[name].numel():
                raise ValueError(f"the ranks have {of_ranks} elements of {name}, which is {list(self.specs[name])}")
        return ranges

    def keep_reference(self, load: Callable[[], PreTrainedModel]) -> None:
        """Spread as the policy is."""
        self._reference, *_ = self.booster.boost(_Shell(Policy(load().eval().requires_grad_(False))))

    def passes(self, count: int) -> int:
        most = torch.tensor(count, device=self.ranks.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    @torch.no_grad()
    def log_probs(self, micro_batch: MicroBatch) -> Tensor:
        return self.model(*micro_batch.inputs)[0]

    @torch.no_grad()
    def reference_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        return self._reference(*micro_batch.inputs)[0]

    def accumulate(self, count: int, load: Load, criterion: Criterion) -> Seconds:
        seconds = Seconds()
        with_reference = self._reference is not None and self.reference_in_loss
        for index in range(self.passes(count)):
            started = self.clock()
            micro_batch = load(min(index, count - 1))
            log_probs, entropy = self.model(*micro_batch.inputs)
            reference = self.reference_log_probs(micro_batch) if with_reference else None
            if index < count:
                loss = criterion(index, micro_batch, log_probs, entropy, reference)
            else:
                loss = 0.0 * log_probs.sum()
            forward_ended = self.clock()
            self.booster.backward(loss * self.data_size, self.optimizer)  # the exchange averages over ranks
            seconds.forward += forward_ended - started
            seconds.backward += self.clock() - forward_ended
        return seconds

    def clip_gradient(self, max_norm: float) -> float:
        gradients = [p.grad for p in self._parameters.values() if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        for gradient in gradients:
            squares += gradient.double().square().sum()
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        if norm > max_norm:
            for gradient in gradients:
                gradient.mul_(max_norm / (norm + 1e-6))
        return norm

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._parameters.items()

    def piece(self, name: str, whole: Tensor) -> Tensor:
        # On one rank FSDP cuts nothing.
        return whole if self.data_size == 1 else whole.reshape(-1).narrow(0, *self._ranges[name][self.data_rank])

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.specs:
            yield name, self._whole(name, self._parameters[name].detach())

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """A rank without an element of a tensor has no state of it: the step count is another's."""
        states: dict[nn.Parameter, dict[str, Any]] = self.optimizer.unwrap().state
        counts = [state["step"] for state in states.values()]
        step = torch.stack(counts).max() if counts else torch.zeros((), device=self.ranks.device)
        dist.all_reduce(step, op=dist.ReduceOp.MAX)
        if not step:
            return
        for name in self.specs:
            state = states.get(self._parameters[name], {})
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{moment}/{name}", self._whole(name, state.get(moment))
            yield f"step/{name}", step.clone()

    def _whole(self, name: str, mine: Tensor | None) -> Tensor:
        """A whole tensor from all ranks' ranges; each sends its own."""
        whole = torch.empty(self.specs[name].numel(), dtype=self.dtype, device=self.ranks.device)
        if mine is not None:
            whole.narrow(0, *self._ranges[name][self.data_rank]).copy_(mine.detach().reshape(-1))
        for rank, (start, length) in enumerate(self._ranges[name]):
            if length:
                dist.broadcast(whole.narrow(0, start, length), src=rank)
        return whole.view(self.specs[name])


def decoder_layers(causal_lm: PreTrainedModel) -> set[type[nn.Module]]:
    """The classes of the layers that a model's family says must stay together.

    Raises:
        LearnerError: it names none that this model has.
    """
    named = set(causal_lm._no_split_modules or ())
    classes = {type(module) for module in causal_lm.modules() if type(module).__name__ in named}
    if not classes:
        raise LearnerError(
            f"plugin 'torch_fsdp' cannot tell the layers of a {causal_lm.config.model_type!r} model: "
            f"it has none of {sorted(named)}; use plugin 'torch_ddp' or 'low_level_zero'"
        )
    return classes
