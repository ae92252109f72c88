"""What the learner asks of a ColossalAI plugin: how a model is spread over the ranks, and how it is trained there."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_trainer.batch import MicroBatch
from quartet_trainer.learner.attention import attends_packed
from quartet_trainer.learner.distributed import Ranks, in_turn
from quartet_trainer.learner.lora import Adapter
from quartet_trainer.learner.model import Policy, ValueHead, untied_names
from quartet_trainer.learner.router import RouterStatistics
from quartet_trainer.learner_settings import LearnerSettings
from quartet_weights.routed_experts import Routing


def clip_parts(
    parts: Sequence[tuple[Tensor, float]],
    max_norm: float,
    device: torch.device,
    groups: Sequence[dist.ProcessGroup | None] = (None,),
) -> float:
    """Scale all parts, in place, so that the whole gradient's norm is `max_norm` at most. All ranks call.

    Args:
        parts: what this rank steps with, of any shape, and the share of each in the sum over all ranks.
        max_norm: above 0.
        device: where the sum is made, in float64.
        groups: one after the other, the sum over each is taken; None: all ranks.

    Returns:
        The norm before, that of the whole gradient.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for part, share in parts:
        squares += share * part.double().square().sum()
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt().item()
    if norm > max_norm:
        for part, _ in parts:
            part.mul_(max_norm / (norm + 1e-6))
    return norm


@contextmanager
def exact_buffers(model: nn.Module) -> Iterator[None]:
    """Within it, a model may be cast; its floating-point buffers are afterwards what they were before, on its device.

    They are rotary frequencies. Rounded to bf16 they are off by up to 0.4%: at the thousandth token an angle of some
    radians, and another model than the one that generates.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    yield
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            exact: Tensor | None = kept.get(f"{name}.{key}" if name else key)
            if exact is not None and buffer is not None:
                module._buffers[key] = exact.to(buffer.device)


Load = Callable[[int], MicroBatch]
"""A micro-batch by its number, on the training device."""

Criterion = Callable[..., Tensor]
"""From a micro-batch's number, the micro-batch, log-probs [t], entropy [t], the reference model's log-probs [t] (None
without one) and, of a plugin with a value head only, the values [t], to its part of the batch's loss, a number."""

CreateOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Phases:
    """Times phases one after another: on CUDA by events in its stream, so that none waits for the one before."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun: list[tuple[str, Any]] = []

    def begin(self, phase: str) -> None:
        """The phase before has ended."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._begun.append((phase, mark))

    def end(self) -> dict[str, float]:
        """The last phase has ended: seconds of all phases by name, once the device is done with them."""
        self.begin("")
        if self._cuda:
            self._begun[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in itertools.pairwise(self._begun):
            took = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            seconds[phase] = seconds.get(phase, 0.0) + took
        return seconds


class Plugin(ABC):
    """One way of spreading the model and the batch over the ranks. Every method is collective unless it says local.

    Names are always Hugging Face's, whatever the plugin does to the model; a tied `lm_head` has its embedding's.
    """

    model: ModelWrapper
    optimizer: OptimizerWrapper
    causal_lm: PreTrainedModel
    """This rank's part of the model."""
    specs: dict[str, torch.Size]
    """Names and shapes of the trained tensors, whole, in order, each storage once: the model's, or the adapter's."""
    model_specs: dict[str, torch.Size]
    """Names and shapes of the model's."""
    adapter: Adapter | None = None
    """What is trained in place of the model, with `lora.r`."""
    value_head: ValueHead | None = None
    """A head that the policy is to have too; set before `boost`, of plugins in `settings.HEAD_PLUGINS` only."""
    router: RouterStatistics | None = None
    """Of a mixture of experts, under a plugin that runs `Policy`."""
    routing: Routing | None = None
    """How the model routes, if micro-batches have `routed_experts`; set before `boost`."""
    reference_in_loss = False
    """Whether `accumulate` gives the reference model's log-probs to its criterion; may be set."""
    _autocast: torch.dtype | None = None
    """Of matrix products, where it is not the weights' own."""
    _reference: nn.Module

    def __init__(self, settings: LearnerSettings, ranks: Ranks, booster: Booster) -> None:
        """Take the place among the ranks. Local."""
        self.settings = settings
        self.ranks = ranks
        self.booster = booster
        self.data_rank = ranks.rank
        """This rank's share of a batch is that of `data_rank` among `data_size`."""
        self.data_size = ranks.world_size
        self.counts = True
        """Whether this rank's sums count in the metrics: one rank of those that see the same tokens."""
        self.dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        """What the optimizer keeps the weights in."""

    def look_at(self, causal_lm: PreTrainedModel) -> None:
        """Take from a whole model what is needed of it when it is spread. Local."""
        self.router = RouterStatistics.of(causal_lm, self.ranks.device)

    def boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        """Spread a model, which this takes over, and make its optimizer. Its weights may be `assign`ed afterwards."""
        state = causal_lm.state_dict()
        self.specs = self.model_specs = {name: state[name].shape for name in untied_names(causal_lm)}
        if self.settings.lora.r:
            self.adapter = Adapter(self.booster, causal_lm, self.settings.lora, self.settings.seed)
            self.specs = {name: parameter.shape for name, parameter in self.adapter.parameters()}
        with exact_buffers(causal_lm):
            self._boost(causal_lm, create_optimizer)

    @abstractmethod
    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None: ...

    def verify(self) -> None:  # noqa: B027 - nothing, for most
        """Raise LearnerError if the model, spread and with its weights, computes something else than it did whole."""

    def _policy(self, causal_lm: PreTrainedModel) -> Policy:
        """The policy to boost, where it is `Policy` that makes the log-probs."""
        return Policy(
            causal_lm,
            self._autocast,
            entropy_gradient=self.settings.entropy_coefficient > 0,
            value_head=self.value_head,
            router=self.router,
            routing=self.routing,
        )

    def keep_reference(self, load: Callable[[], PreTrainedModel]) -> None:
        """Keep the model as it is now for `reference_log_probs`; `load` gives a second, whole one.

        It is in the policy's own precision, and not boosted: it has no optimizer. Under an adapter it is there already.
        """
        if self.adapter is None:
            dtype = next(self.causal_lm.parameters()).dtype
            with in_turn(self.ranks):
                self._reference = Policy(load(), self._autocast).eval().requires_grad_(False)
                with exact_buffers(self._reference):
                    self._reference.to(self.ranks.device, dtype)

    def accumulate(self, count: int, load: Load, criterion: Criterion) -> dict[str, float]:
        """Add the gradient of the sum, over this rank's micro-batches and all ranks, of the criterion's losses.

        Where a rank takes part in more passes than it has micro-batches, its last stands in, without weight.

        Returns:
            Seconds of "forward" and "backward", this rank's.
        """
        phases, rounds = Phases(self.ranks.device), self._rounds(count)
        for index in range(rounds):
            phases.begin("forward")
            micro_batch = load(min(index, count - 1))
            reference = self.reference_log_probs(micro_batch) if self.reference_in_loss else None
            with self._exchange(index == rounds - 1):
                log_probs, entropy, *values = self._outputs(self.model, micro_batch)
                if index < count:
                    loss = criterion(index, micro_batch, log_probs, entropy, reference, *values)
                else:
                    loss = 0.0 * sum(output.sum() for output in (log_probs, *values))
                phases.begin("backward")
                self.booster.backward(loss * self.data_size, self.optimizer)  # the exchange averages over ranks
        return phases.end()

    def _rounds(self, count: int) -> int:
        """Passes with gradient of a rank with `count` micro-batches: more, where every backward takes all ranks."""
        return count

    def _most(self, count: int, group: dist.ProcessGroup | None = None) -> int:
        """The greatest `count` of a group's ranks, of all by default."""
        most = torch.tensor(count, device=self.ranks.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return int(most)

    def _exchange(self, last: bool) -> AbstractContextManager:
        """Within it, forward and backward exchange gradients if they must: in the `last` of a step. Local."""
        return nullcontext() if last else self.booster.no_sync(self.model, self.optimizer)

    def _outputs(self, model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Log-probs, entropy, and with a value head values, of the boosted policy or reference model."""
        return model(*micro_batch.inputs)

    @torch.no_grad()
    def log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """The policy's log-probs [t], without gradient; zeros on some of the ranks whose `counts` is false.

        Collective among the ranks with the same share of the batch only, or where `passes` says more, among all.
        """
        return self.model.unwrap()(*micro_batch.inputs)[0]

    @torch.no_grad()
    def reference_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """The reference model's; see `log_probs`."""
        if self.adapter is not None:
            with self.adapter.disabled():
                return self.log_probs(replace(micro_batch, routed_experts=None))
        return self._reference(*micro_batch.inputs)[0]

    def passes(self, count: int) -> int:
        """Forward passes that this rank takes part in where it has `count` micro-batches of its own: more, where all
        ranks are needed for each."""
        return count

    @property
    def shares_prompts(self) -> bool:
        """Whether it takes micro-batches with `packing`. Local."""
        return attends_packed(self.causal_lm)

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """The value head's values [t], without gradient. Local."""
        return self.model.unwrap().values(micro_batch)

    @torch.no_grad()
    def log_probs_and_values(self, micro_batch: MicroBatch) -> Tensor:
        """Both, [2, t], of one forward pass. Local."""
        log_probs, _, values = self.model.unwrap()(*micro_batch.inputs)
        return torch.stack([log_probs, values])

    def clip_gradient(self, max_norm: float) -> float:
        """Scale the gradient down to `max_norm`; returns its norm before, over all parameters of the whole model."""
        return self.optimizer.clip_grad_by_norm(max_norm, foreach=True).item()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, or their pieces, by the whole tensor's name. Local."""
        yield from self.adapter.parameters() if self.adapter else self.causal_lm.named_parameters()

    def trained(self, parameter: nn.Parameter) -> Tensor:
        """The key of a parameter's state in the optimizer: itself, or what is updated in its place. Local."""
        return parameter

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """What this rank's optimizer holds of a whole tensor of the shape `specs[name]`. Local."""
        return whole

    def whole(self, parameter: nn.Parameter, piece: Tensor) -> Tensor:
        """A whole tensor, in the parameter's shape, from what each rank's optimizer holds of it."""
        return piece

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        """Set the weights of that name to a whole tensor, as far as this rank holds them. Local."""
        for held, parameter in self.parameters():
            if held == name:
                parameter.copy_(self.piece(name, whole))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained tensors, whole, in the order of `specs`, on the training device; maybe the parameters' memory."""
        state = dict(self.adapter.parameters()) if self.adapter else self.causal_lm.state_dict()
        for name in self.specs:
            yield name, state[name].detach()

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The whole model's tensors in the order of `model_specs`, adapters added where there are some."""
        yield from self.adapter.merged() if self.adapter else self.weights()

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """The whole optimizer's state: "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME"."""
        states = self.optimizer.unwrap().state
        for name, parameter in self.parameters():
            for moment, value in states.get(self.trained(parameter), {}).items():
                yield f"{moment}/{name}", value.detach()
