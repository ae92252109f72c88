"""HybridParallelPlugin: each layer's matrices over tp ranks, the layers over pp stages, the batch over what is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.shardformer import ShardFormer
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_trainer.batches import MicroBatch
from quartet_trainer.learner.base import LearnerError
from quartet_trainer.learner.distributed import Ranks
from quartet_trainer.learner.plugins.base import CreateOptimizer, Criterion, Load, Plugin, Seconds
from quartet_trainer.learner.plugins.shards import Shards
from quartet_trainer.learner.plugins.stage import Stage
from quartet_trainer.learner.settings import LearnerSettings

FAMILIES = ("qwen2", "llama")
"""Model types of which ColossalAI's sharding was run here."""


class HybridParallel(Plugin):
    """Tensor, pipeline and data parallelism, each alone or together.

    Without stages, micro-batches run one by one as under DDP. With stages, all micro-batches of a step go through one
    1F1B schedule; each pipeline may have another number of them, for only the exchange of gradients at the end joins
    pipelines.
    """

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        tp, pp = settings.tp_size, settings.pp_size
        if ranks.world_size % (tp * pp):
            raise LearnerError(
                f"trainer.tp_size {tp} * trainer.pp_size {pp} must divide the number of ranks, {ranks.world_size}"
            )
        self._half = settings.precision == "bf16"
        parallel = HybridParallelPlugin(
            tp_size=tp,
            pp_size=pp,
            # fp32 leaves the weights as they are loaded; with bf16 the optimizer has copies in float32.
            precision="bf16" if self._half else "fp32",
            zero_stage=0,
            num_microbatches=1,  # set for each step, see _schedule
            microbatch_size=1,
            enable_metadata_cache=False,  # micro-batches differ in shape
            make_vocab_size_divisible_by=1,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
        )
        super().__init__(settings, ranks, Booster(plugin=parallel))
        self._parallel = parallel
        self._staged = pp > 1
        self._last = parallel.stage_manager is None or parallel.stage_manager.is_last_stage()
        self._reference: Stage | None = None
        self.data_rank = dist.get_rank(parallel.dp_group)
        self.data_size = parallel.dp_size
        self.counts = self._last and dist.get_rank(parallel.tp_group) == 0

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        self._check(causal_lm)
        tied = causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight
        self.model, self.optimizer, *_ = self.booster.boost(causal_lm, create_optimizer(causal_lm))
        self.model.convert_fn = None  # it would round the temperatures to bf16
        self.causal_lm = self.model.unwrap()
        self._shards = Shards(
            self.causal_lm, self.specs, tied, tp_group=self._parallel.tp_group, pp_group=self._parallel.pp_group
        )
        self._stage = self._make_stage(self.causal_lm)

    def _check(self, causal_lm: PreTrainedModel) -> None:
        config, tp, pp = causal_lm.config, self.settings.tp_size, self.settings.pp_size
        if config.model_type not in FAMILIES:
            raise LearnerError(
                f"plugin 'hybrid_parallel' is tried with {', '.join(FAMILIES)} models, not with {config.model_type!r}; "
                "use plugin 'torch_ddp'"
            )
        for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
            if getattr(config, name) % tp:
                raise LearnerError(f"trainer.tp_size {tp} does not divide the model's {name}, {getattr(config, name)}")
        if config.num_hidden_layers < pp:
            raise LearnerError(f"trainer.pp_size {pp} is more than the model's {config.num_hidden_layers} layers")

    def _make_stage(self, causal_lm: PreTrainedModel) -> Stage:
        return Stage(
            causal_lm,
            staged=self._staged,
            is_last=self._last,
            tp_group=self._parallel.tp_group,
        )

    def keep_reference(self, load: Callable[[], PreTrainedModel]) -> None:
        """Sharded as the policy is, without DDP around it, which needs gradients."""
        causal_lm = load().eval().requires_grad_(False)
        sharded, _ = ShardFormer(self._parallel.shard_config).optimize(causal_lm)
        dtype = next(self.causal_lm.parameters()).dtype
        self._reference = self._make_stage(sharded.to(self.ranks.device, dtype))

    def accumulate(self, count: int, load: Load, criterion: Criterion) -> Seconds:
        with_reference = self._reference is not None and self.reference_in_loss
        if self._staged:
            return self._accumulate_staged(count, load, criterion, with_reference)
        seconds = Seconds()
        for index in range(count):
            started = self.clock()
            micro_batch = load(index)
            self._parallel_sync(index == count - 1)
            log_probs, entropy = self.model(*micro_batch.inputs)
            reference = self.reference_log_probs(micro_batch) if with_reference else None
            loss = criterion(index, micro_batch, log_probs, entropy, reference)
            forward_ended = self.clock()
            self.booster.backward(loss * self.data_size, self.optimizer)
            seconds.forward += forward_ended - started
            seconds.backward += self.clock() - forward_ended
        return seconds

    def _parallel_sync(self, exchange: bool) -> None:
        """Whether the next backward exchanges gradients among the data-parallel ranks."""
        self.model.module.require_backward_grad_sync = exchange

    def _accumulate_staged(self, count: int, load: Load, criterion: Criterion, with_reference: bool) -> Seconds:
        references: list[Tensor | None] = [None] * count
        if with_reference:
            references = [self.reference_log_probs(load(index)) for index in range(count)]
        # The schedule wants at least as many micro-batches as stages: the last, the least, stands in, without weight.
        padded = max(count, self.settings.pp_size)
        started = self.clock()
        self._stage.begin(lambda index: load(min(index, count - 1)))

        def loss(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
            index, log_probs = int(inputs["index"]), outputs["log_probs"]
            if index >= count:
                return 0.0 * log_probs.sum()
            part = criterion(index, self._stage.micro_batch, log_probs, outputs["entropy"], references[index])
            return part * (self.data_size * padded)  # the schedule divides by the micro-batches, the exchange by ranks

        self.booster.execute_pipeline(
            self._schedule(padded), self.model, loss, self.optimizer, return_loss=False, return_outputs=False
        )
        forward = self._stage.end()
        return Seconds(forward=forward, backward=self.clock() - started - forward)

    def _schedule(self, micro_batches: int) -> Iterator[dict[str, Tensor]]:
        """Prepare the schedule for that many micro-batches; the "batch" it cuts up is only their numbers."""
        scheduler = self._parallel.scheduler
        scheduler.num_microbatches = None
        scheduler.microbatch_size = 1
        scheduler.last_batch_size = None
        return iter([{"index": torch.arange(micro_batches)}])

    def log_probs(self, micro_batch: MicroBatch) -> Tensor:
        return self._forward(self._stage, micro_batch)

    def reference_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        return self._forward(self._reference, micro_batch)

    @torch.no_grad()
    def _forward(self, stage: Stage, micro_batch: MicroBatch) -> Tensor:
        if not self._staged:
            return stage.causal_lm(*micro_batch.inputs)[0]
        found = torch.zeros(micro_batch.targets.numel(), dtype=self.dtype, device=self.ranks.device)

        def keep(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
            found.copy_(outputs["log_probs"])
            return found.sum()

        stage.begin(lambda index: micro_batch)
        self._parallel.scheduler.forward_backward_step(stage.causal_lm, self._schedule(1), keep)
        stage.end()
        return found

    def clip_gradient(self, max_norm: float) -> float:
        squares = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        parameters = [(p, owned) for _, p, owned in self._shards.gradients() if p.grad is not None]
        for parameter, owned in parameters:
            squares += owned * parameter.grad.double().square().sum()
        for group in (self._parallel.tp_group, self._parallel.pp_group):
            dist.all_reduce(squares, group=group)
        norm = squares.sqrt().item()
        if norm > max_norm:
            for parameter, _ in parameters:
                parameter.grad.mul_(max_norm / (norm + 1e-6))
        return norm

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._shards.parameters()

    def piece(self, name: str, whole: Tensor) -> Tensor:
        return self._shards.piece(name, whole)

    def trained(self, parameter: nn.Parameter) -> Tensor:
        return self.optimizer.get_working_to_master_map()[id(parameter)] if self._half else parameter

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        for held, parameter in self.parameters():
            if held == name:
                for copy in (parameter, self.trained(parameter)):
                    copy.copy_(self.piece(name, whole))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.specs:
            yield name, self._shards.whole(name, lambda parameter: self.trained(parameter).detach(), self.dtype)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        states: dict[nn.Parameter, dict[str, Any]] = self.optimizer.unwrap().state
        if not states:
            return
        step = next(iter(states.values()))["step"].detach()
        for name in self.specs:
            for moment in ("exp_avg", "exp_avg_sq"):
                yield (
                    f"{moment}/{name}",
                    self._shards.whole(name, lambda p, m=moment: states[self.trained(p)][m], self.dtype),
                )
            yield f"step/{name}", step.clone()
