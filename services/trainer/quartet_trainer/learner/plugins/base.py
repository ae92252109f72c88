"""The learner's interface to a ColossalAI plugin: how a model is spread over the ranks and trained.

What `Plugin` implements is for ranks that hold the whole model, as `DataParallel` does; other plugins override it.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_trainer.batch import MicroBatch
from quartet_trainer.errors import LearnerError
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
    """Scale the gradient in place so that its norm over all ranks is at most `max_norm`. All ranks call.

    Args:
        parts: this rank's parts of the gradient, of any shape, each with its share in the sum over all ranks: less than
            1 if other ranks hold the same part.
        max_norm: above 0.
        device: where the squares are summed, in float64.
        groups: the groups to sum over, one after another; None: all ranks.

    Returns:
        The norm of the whole gradient before scaling.
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
    """Restore a model's floating-point buffers after a block that casts the model, on its new device.

    They are rotary frequencies. Rounded to bf16 they are off by up to 0.4%: by some radians at the thousandth token,
    and log-probs would differ from the rollout's.
    """
    kept = {name: buffer.clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    yield
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            exact: Tensor | None = kept.get(f"{name}.{key}" if name else key)
            if exact is not None and buffer is not None:
                module._buffers[key] = exact.to(buffer.device)


Load = Callable[[int], MicroBatch]
"""From a micro-batch's index to the micro-batch, on the training device."""

Criterion = Callable[..., Tensor]
"""From a micro-batch's index, the micro-batch, log-probs [t], entropy [t], the reference model's log-probs [t] or None,
and with a value head the values [t], to the micro-batch's part of the batch's loss, a scalar."""

CreateOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Phases:
    """Times consecutive phases: on CUDA by events in the stream, so that no phase waits for the previous one."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._begun: list[tuple[str, Any]] = []

    def begin(self, phase: str) -> None:
        """End the previous phase and begin this one."""
        mark: Any = time.perf_counter()
        if self._cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._begun.append((phase, mark))

    def end(self) -> dict[str, float]:
        """End the last phase, wait for the device, and return the seconds of all phases by name."""
        self.begin("")
        if self._cuda:
            self._begun[-1][1].synchronize()
        seconds: dict[str, float] = {}
        for (phase, begin), (_, end) in itertools.pairwise(self._begun):
            took = begin.elapsed_time(end) / 1000 if self._cuda else end - begin
            seconds[phase] = seconds.get(phase, 0.0) + took
        return seconds


class Plugin(ABC):
    """One way to spread the model and the batch over the ranks. Methods are collective unless marked local.

    Names of tensors are Hugging Face's under every plugin; a tied `lm_head` has its embedding's.
    """

    model: ModelWrapper
    optimizer: OptimizerWrapper
    causal_lm: PreTrainedModel
    """This rank's part of the model."""
    specs: dict[str, torch.Size]
    """Names and whole shapes of the trained tensors, in order, each storage once: the model's, or the adapter's."""
    model_specs: dict[str, torch.Size]
    """Names and whole shapes of the model's tensors: its parameters, then its `buffers`."""
    buffers: dict[str, Tensor]
    """By name, what a model's files hold beside parameters, as the biases by which routers choose. Every rank has all
    of them, whole and exact; of those of its own modules, the very tensors."""
    frozen: set[str]
    """Names of the model's parameters that its family does not train: the optimizer does not have them."""
    adapter: Adapter | None = None
    """With `lora.r`: trained instead of the model."""
    value_head: ValueHead | None = None
    """Set before `boost`, only for plugins in `learner_settings.HEAD_PLUGINS`, if the policy has a value head."""
    router: RouterStatistics | None = None
    """For a mixture of experts, if the plugin runs `Policy`."""
    routing: Routing | None = None
    """Set before `boost`, if micro-batches have `routed_experts`."""
    reference_in_loss = False
    """Whether `accumulate` passes the reference model's log-probs to its criterion; may be set."""
    _reference_is_spread = False
    """Whether all ranks take part in each pass of the reference model."""
    _autocast: torch.dtype | None = None
    """The dtype of matrix products; None: the weights' own."""
    _reference: nn.Module
    _reference_is_base = False
    """Whether the reference is the model below the adapter."""

    def __init__(self, settings: LearnerSettings, ranks: Ranks, booster: Booster) -> None:
        """Local."""
        self.settings = settings
        self.ranks = ranks
        self.booster = booster
        self.data_rank = ranks.rank
        """This rank's index among the `data_size` shares of a batch."""
        self.data_size = ranks.world_size
        self.counts = True
        """Whether this rank's sums count in the metrics: true for one of the ranks that compute the same tokens."""
        self.dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        """The dtype of the optimizer's weights."""

    def inspect(self, causal_lm: PreTrainedModel) -> None:
        """Check a whole model, and compute what is needed of it after it is spread. Local."""
        self.router = RouterStatistics.of(causal_lm, self.ranks.device)

    def boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        """Spread a model in place and create its optimizer. Its weights may be `assign`ed afterwards.

        Raises:
            LearnerError: the model has a buffer of integers.
        """
        state, parameters = causal_lm.state_dict(), dict(causal_lm.named_parameters())
        names = untied_names(causal_lm)
        self.specs = {name: state[name].shape for name in names if name in parameters}
        self.buffers = {name: state[name].to(self.ranks.device) for name in names if name not in parameters}
        self.model_specs = self.specs | {name: buffer.shape for name, buffer in self.buffers.items()}
        if odd := next((name for name, buffer in self.buffers.items() if not buffer.is_floating_point()), ""):
            raise LearnerError(
                f"a {causal_lm.config.model_type!r} model cannot be trained: its buffer {odd} has elements of "
                f"{state[odd].dtype}; allowed: floating-point numbers, the elements of weights in transfer"
            )
        self.frozen = {name for name, parameter in causal_lm.named_parameters() if not parameter.requires_grad}
        if self.settings.lora.r:
            self.adapter = Adapter(self.booster, causal_lm, self.settings.lora, self.settings.seed)
            self.specs = {name: parameter.shape for name, parameter in self.adapter.parameters()}
        with exact_buffers(causal_lm):
            self._boost(causal_lm, create_optimizer)
        for name, buffer in self.causal_lm.named_buffers():
            if (whole := name.replace("_fsdp_wrapped_module.", "")) in self.buffers:
                self.buffers[whole] = buffer

    @abstractmethod
    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None: ...

    def verify(self) -> None:  # noqa: B027 - only `HybridParallel` checks anything
        """Raise LearnerError if the model computes other log-probs now that it is spread."""

    def _policy(self, causal_lm: PreTrainedModel) -> Policy:
        """The policy to boost, of plugins that compute log-probs by `Policy`."""
        return Policy(
            causal_lm,
            self._autocast,
            entropy_gradient=self.settings.entropy_bonus,
            value_head=self.value_head,
            router=self.router,
            routing=self.routing,
        )

    def keep_reference(self, load: Callable[[], PreTrainedModel], *, other: bool = False) -> None:
        """Keep the current model for `reference_log_probs`; `load` returns a second, whole one.

        It has the policy's precision, and is not boosted. With an adapter nothing is loaded: the base model is it.
        `other`: `load` returns another model, which is kept in any case.
        """
        self._reference_is_base = self.adapter is not None and not other
        if not self._reference_is_base:
            dtype = next(self.causal_lm.parameters()).dtype
            with in_turn(self.ranks):
                self._reference = Policy(load(), self._autocast).eval().requires_grad_(False)
                with exact_buffers(self._reference):
                    self._reference.to(self.ranks.device, dtype)

    @torch.no_grad()
    def sync_reference(self) -> None:
        """Let the reference model take the policy's weights, as they compute. Not with an adapter. Local."""
        for own, kept in zip(*self._policy_and_reference(), strict=True):
            kept.copy_(own)

    def _policy_and_reference(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        """This rank's parts of the policy and of the reference model, in the same order."""
        return self.causal_lm.parameters(), self._reference.parameters()

    def accumulate(self, count: int, load: Load, criterion: Criterion, texts: int = 0) -> dict[str, float]:
        """Run forward and backward of this rank's micro-batches: add the gradient of the sum of all ranks' losses.

        If a rank takes part in more passes than it has micro-batches, it repeats the last with a loss of 0. The first
        `texts` micro-batches need no reference model.

        Returns:
            Seconds of "forward" and "backward", this rank's.
        """
        phases, rounds = Phases(self.ranks.device), self._rounds(count)
        for index in range(rounds):
            phases.begin("forward")
            micro_batch = load(min(index, count - 1))
            if self.router and index >= count:
                self.router.counts = False
            wanted = self.reference_in_loss and (texts <= index < count or self._reference_is_spread)
            reference = self.reference_log_probs(micro_batch) if wanted else None
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
        """Passes with gradient of a rank with `count` micro-batches: more, if every backward pass is collective."""
        return count

    def _most(self, count: int, group: dist.ProcessGroup | None = None) -> int:
        """The largest `count` among the ranks of a group, by default all."""
        most = torch.tensor(count, device=self.ranks.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        return int(most)

    def _exchange(self, last: bool) -> AbstractContextManager:
        """A context in which forward and backward exchange gradients only if they are the `last` of a step. Local."""
        return nullcontext() if last else self.booster.no_sync(self.model, self.optimizer)

    def _outputs(self, model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Log-probs, entropy, and with a value head the values, of the boosted policy or reference model."""
        return model(*micro_batch.inputs)

    @torch.no_grad()
    def log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """The policy's log-probs [t], without gradient; may be zeros on ranks whose `counts` is false.

        Collective among the ranks with the same share of the batch; among all ranks under the plugins of `Ranged`.
        """
        return self.model.unwrap()(*micro_batch.inputs)[0]

    @torch.no_grad()
    def reference_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        """The reference model's log-probs; see `log_probs`."""
        if self._reference_is_base and self.adapter is not None:
            with self.adapter.disabled():
                return self.log_probs(replace(micro_batch, routed_experts=None))
        return self._reference(*micro_batch.inputs)[0]

    def passes(self, count: int) -> int:
        """Forward passes without gradient of a rank with `count` micro-batches: more, if every pass is collective."""
        return count

    @property
    def shares_prompts(self) -> bool:
        """Whether micro-batches may have `packing`. Local."""
        return attends_packed(self.causal_lm)

    @torch.no_grad()
    def values(self, micro_batch: MicroBatch) -> Tensor:
        """The value head's values [t], without gradient. Local."""
        return self.model.unwrap().values(micro_batch)

    @torch.no_grad()
    def log_probs_and_values(self, micro_batch: MicroBatch) -> Tensor:
        """Log-probs and values, [2, t], of one forward pass without gradient. Local."""
        log_probs, _, values = self.model.unwrap()(*micro_batch.inputs)
        return torch.stack([log_probs, values])

    def clip_gradient(self, max_norm: float) -> float:
        """Scale the gradient down to `max_norm`; returns the whole model's norm before."""
        return self.optimizer.clip_grad_by_norm(max_norm, foreach=True).item()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, or pieces of them, with the whole tensor's name. Local."""
        yield from self.adapter.parameters() if self.adapter else self.causal_lm.named_parameters()

    def trained(self, parameter: nn.Parameter) -> Tensor:
        """The key of a parameter's state in the optimizer: itself, or the tensor updated instead of it. Local."""
        return parameter

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """The piece of a whole tensor, of shape `specs[name]`, that this rank's optimizer holds. Local."""
        return whole

    def whole(self, parameter: nn.Parameter, piece: Tensor) -> Tensor:
        """Gather a whole tensor, in the parameter's shape, from the pieces that the ranks' optimizers hold."""
        return piece

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        """Copy this rank's piece of a whole tensor into the weights of that name. Local."""
        for held, parameter in self.parameters():
            if held == name:
                parameter.copy_(self.piece(name, whole))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the trained tensors in the order of `specs`, on the training device; may be the parameters' memory."""
        state = dict(self.adapter.parameters()) if self.adapter else self.causal_lm.state_dict()
        for name in self.specs:
            yield name, state[name].detach()

    def model_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the model's tensors in the order of `model_specs`, adapters merged."""
        yield from self._merged(self.adapter) if self.adapter else self.weights()
        yield from self.buffers.items()

    def _merged(self, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
        """Gather the model's parameters with the adapter added."""
        yield from adapter.merged()

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the optimizer's state: "exp_avg/NAME", "exp_avg_sq/NAME", "step/NAME"."""
        states = self.optimizer.unwrap().state
        for name, parameter in self.parameters():
            for moment, value in states.get(self.trained(parameter), {}).items():
                yield f"{moment}/{name}", value.detach()


class DataParallel(Plugin):
    """TorchDDPPlugin: every rank holds the whole model and computes its share of the batch.

    The ranks exchange gradients once a step, in the last micro-batch's backward.
    """

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        super().__init__(
            settings, ranks, Booster(plugin=TorchDDPPlugin(gradient_as_bucket_view=True, broadcast_buffers=False))
        )
        self._autocast = torch.bfloat16 if settings.precision == "bf16" else None

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        policy = self._policy(causal_lm)
        self.causal_lm = causal_lm
        self.model, self.optimizer, *_ = self.booster.boost(policy, create_optimizer(policy))
