"""HybridParallelPlugin: tensor, pipeline, sequence and data parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelZeroOptimizer, get_param_info
from colossalai.shardformer import ShardFormer
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_trainer.batch import MicroBatch
from quartet_trainer.learner.checks import check_model, check_ranks
from quartet_trainer.learner.distributed import Ranks, in_turn
from quartet_trainer.learner.lora import Adapter, merge
from quartet_trainer.learner.model import without_weights
from quartet_trainer.learner.plugins.base import (
    CreateOptimizer,
    Criterion,
    Load,
    Phases,
    Plugin,
    clip_parts,
    exact_buffers,
)
from quartet_trainer.learner.plugins.sequence import SequenceParallel
from quartet_trainer.learner.plugins.sharded import Shards
from quartet_trainer.learner.plugins.sharding_policy import ShardingPolicy, check_log_probs, check_modules, probe
from quartet_trainer.learner.plugins.stage import Stage
from quartet_trainer.learner.plugins.zero import ZeroRows
from quartet_trainer.learner_settings import LearnerSettings


class HybridParallel(Plugin):
    """Each layer's matrices over tp ranks, the layers over pp stages, sequences over sp ranks, the batch over the rest.

    Without stages, micro-batches run one by one as under DDP. With stages, all micro-batches of a step go through one
    1F1B schedule; pipelines may have different numbers of them, because they meet only in the final gradient reduction.

    With ZeRO, a rank's optimizer holds a row of its part of a tensor, see `ZeroRows`. Stage 1 reduces gradients in a
    step's last backward pass, stage 2, which needs pp 1, in each.
    """

    _shards: Shards
    """Of the trained tensors."""
    _model_shards: Shards
    """With an adapter only: of the base model."""
    _layers: dict[int, LoraLayer | None]
    """With an adapter only: by a base parameter's id, the layer that has its adapter."""
    _rows: ZeroRows | None = None
    """With ZeRO only."""

    def __init__(self, settings: LearnerSettings, ranks: Ranks) -> None:
        tp, pp, sp = settings.tp_size, settings.pp_size, settings.sp_size
        check_ranks(settings, ranks.world_size)
        self._half = settings.precision == "bf16"  # the model is in bf16, the optimizer has float32 copies
        data_size = ranks.world_size // (tp * pp * sp)
        # ZeRO also spans the ranks that share sequences, which hold the same weights. It needs at least two ranks.
        zero_stage = (settings.zero_stage or 0) if data_size * sp > 1 else 0
        parallel = HybridParallelPlugin(
            tp_size=tp,
            pp_size=pp,
            # fp32 leaves the weights in the dtype they are loaded in.
            precision="bf16" if self._half else "fp32",
            zero_stage=zero_stage,
            enable_sequence_parallelism=sp > 1,
            sequence_parallelism_mode="all_to_all" if sp > 1 else None,
            sp_size=sp,
            num_microbatches=1,  # set for each step, see _schedule
            microbatch_size=1,
            enable_metadata_cache=False,  # micro-batches differ in shape
            make_vocab_size_divisible_by=1,
            broadcast_buffers=False,
            custom_policy=ShardingPolicy(),
            gradient_as_bucket_view=True,
        )
        super().__init__(settings, ranks, Booster(plugin=parallel))
        self._parallel = parallel
        self._staged = pp > 1
        self._zero_stage = zero_stage
        replicas = parallel.mixed_dp_group  # data-parallel ranks and those that share sequences: the same weights
        # Ranks of each of these groups hold different parts of the gradient: its norm is summed over them.
        self._holders = (parallel.tp_group, parallel.pp_group, *([replicas] if zero_stage else []))
        self._sequence: SequenceParallel | None = None
        if sp > 1:
            self._sequence = SequenceParallel(parallel.sp_group)
        self._last = parallel.stage_manager is None or parallel.stage_manager.is_last_stage()
        self._reference_stage: Stage
        self.data_rank = dist.get_rank(parallel.dp_group)
        self.data_size = data_size
        self.counts = self._last and dist.get_rank(parallel.tp_group) == 0 == dist.get_rank(parallel.sp_group)

    def inspect(self, causal_lm: PreTrainedModel) -> None:
        """Check it, and compute the log-probs that `verify` compares with."""
        check_model(causal_lm.config, self.settings)
        check_modules(causal_lm, self.settings)
        self._probe = probe(causal_lm)

    def _boost(self, causal_lm: PreTrainedModel, create_optimizer: CreateOptimizer) -> None:
        tied = causal_lm.get_output_embeddings().weight is causal_lm.get_input_embeddings().weight
        optimizer = create_optimizer(causal_lm)
        if self._zero_stage:
            self.model, *_ = self.booster.boost(causal_lm)
        else:
            self.model, self.optimizer, *_ = self.booster.boost(causal_lm, optimizer)
        if self.adapter:
            self.model.shared_params = []  # a tied matrix is frozen: its two stages exchange no gradient
        if self._zero_stage:
            self.optimizer = self._zero_optimizer(optimizer)
            self._rows = ZeroRows(
                self.optimizer, self._parallel.mixed_dp_group, self.ranks.device, partitions=self._zero_stage == 2
            )
        self.model.convert_fn = None  # it would round the temperatures to bf16
        self.causal_lm = self.model.unwrap()
        groups = {"tp_group": self._parallel.tp_group, "pp_group": self._parallel.pp_group}
        if self.adapter is None:
            self._shards = Shards(self.causal_lm.named_parameters(), self.specs, tied, **groups)
        else:
            self._shards = Shards(self.adapter.parameters(), self.specs, tied, **groups)
            held = list(self.adapter.model_parameters())
            specs = {name: shape for name, shape in self.model_specs.items() if name not in self.buffers}
            self._model_shards = Shards([(name, p) for name, p, _ in held], specs, tied, **groups)
            self._layers = {id(parameter): layer for _, parameter, layer in held}
        self._stage = self._make_stage(self.causal_lm)

    def verify(self) -> None:
        micro_batch, expected = self._probe
        found = self.log_probs(micro_batch.to(self.ranks.device, self.dtype))
        check_log_probs(found, expected, self.settings.precision, self._last)

    def _zero_optimizer(self, optimizer: torch.optim.Optimizer) -> HybridParallelZeroOptimizer:
        """Create ZeRO's optimizer as the plugin would, which does it for half precision only."""
        parallel = self._parallel
        return HybridParallelZeroOptimizer(
            optimizer,
            self.model,
            use_pipeline=self._staged,
            param_info=get_param_info(optimizer),
            dp_process_group=parallel.mixed_dp_group,
            tp_process_group=parallel.tp_group,
            pp_process_group=parallel.pp_group,
            partition_grad=self._zero_stage == 2,
            cpu_offload=self.settings.offload_optimizer,
            # With stages, gradients are reduced at the end, where nothing computes beside it.
            overlap_communication=self.ranks.device.type == "cuda" and not self._staged,
            clip_grad_norm=0.0,  # clip_gradient does it, before it is known whether the step is taken
        )

    def _make_stage(self, causal_lm: PreTrainedModel) -> Stage:
        parallel = self._parallel
        return Stage(causal_lm, stages=parallel.stage_manager, tp_group=parallel.tp_group, sequence=self._sequence)

    @torch.no_grad()
    def keep_reference(self, load: Callable[[], PreTrainedModel], *, other: bool = False) -> None:
        """See `Plugin`. The reference is sharded like the policy, without DDP, which needs gradients."""
        if self.adapter:
            return
        with in_turn(self.ranks):
            causal_lm = without_weights(load().eval().requires_grad_(False))
        sharded, _ = ShardFormer(self._parallel.shard_config).optimize(causal_lm, policy=ShardingPolicy())
        dtype = next(self.causal_lm.parameters()).dtype
        with exact_buffers(sharded):
            sharded.to(self.ranks.device, dtype)
        self._reference_stage = self._make_stage(sharded)
        self.sync_reference()

    def _policy_and_reference(self) -> tuple[Iterable[Tensor], Iterable[Tensor]]:
        return self.causal_lm.parameters(), self._reference_stage.causal_lm.parameters()

    def accumulate(self, count: int, load: Load, criterion: Criterion, texts: int = 0) -> dict[str, float]:
        if self._staged:
            return self._accumulate_staged(count, load, criterion, texts)
        return super().accumulate(count, load, criterion, texts)

    def _rounds(self, count: int) -> int:
        return self._most(count, self._parallel.dp_group) if self._zero_stage == 2 else count

    def _exchange(self, last: bool) -> AbstractContextManager:
        """See `Plugin`. The exchange is among data-parallel ranks and those that share sequences."""
        exchange = last or self._zero_stage == 2
        if self._rows:
            self.optimizer.require_grad_sync = exchange
        else:
            self.model.module.require_backward_grad_sync = exchange
        self.model.require_grad_sync = exchange
        return nullcontext()

    def _accumulate_staged(self, count: int, load: Load, criterion: Criterion, texts: int) -> dict[str, float]:
        references: list[Tensor | None] = [None] * count
        if self.reference_in_loss:
            references[texts:] = [self.reference_log_probs(load(index)) for index in range(texts, count)]
        # The schedule needs at least as many micro-batches as stages: the last, the smallest, is repeated, with loss 0.
        padded = max(count, self.settings.pp_size)
        phases = Phases(self.ranks.device)
        phases.begin("all")
        self._stage.begin(lambda index: load(min(index, count - 1)))

        def loss(outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> Tensor:
            index, log_probs = int(inputs["index"]), outputs["log_probs"]
            if index >= count:
                return 0.0 * log_probs.sum()
            part = criterion(index, self._stage.micro_batch, log_probs, outputs["entropy"], references[index])
            return part * (self.data_size * padded)  # the schedule divides by micro-batches, the reduction by ranks

        self.booster.execute_pipeline(
            self._schedule(padded), self.model, loss, self.optimizer, return_loss=False, return_outputs=False
        )
        forward = self._stage.end()
        return {"forward": forward, "backward": phases.end()["all"] - forward}

    def _schedule(self, micro_batches: int) -> Iterator[dict[str, Tensor]]:
        """Prepare the schedule for that many micro-batches; the batch that it splits is their indices."""
        scheduler = self._parallel.scheduler
        scheduler.num_microbatches = None
        scheduler.microbatch_size = 1
        scheduler.last_batch_size = None
        return iter([{"index": torch.arange(micro_batches)}])

    def log_probs(self, micro_batch: MicroBatch) -> Tensor:
        return self._forward(self._stage, micro_batch)

    def reference_log_probs(self, micro_batch: MicroBatch) -> Tensor:
        if self.adapter:
            with self.adapter.disabled():
                return self.log_probs(micro_batch)
        return self._forward(self._reference_stage, micro_batch)

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
        own: dict[int, Tensor] = {id(p): p.grad for _, p in self.parameters() if p.grad is not None}
        if self._rows:
            own = {id(parameter): row for parameter, row in self._rows.gradients()}
        parts = [(own[id(p)], share) for _, p, share in self._shards.gradients() if id(p) in own]
        return clip_parts(parts, max_norm, self.ranks.device, self._holders)

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._shards.parameters()

    def piece(self, name: str, whole: Tensor) -> Tensor:
        piece = self._shards.piece(name, whole)
        return self._rows.row(piece) if self._rows and name not in self.frozen else piece

    def trained(self, parameter: nn.Parameter) -> Tensor:
        if self._rows:
            return self._rows.master(parameter)
        return self.optimizer.get_working_to_master_map().get(id(parameter), parameter) if self._half else parameter

    @torch.no_grad()
    def assign(self, name: str, whole: Tensor) -> None:
        for held, parameter in self.parameters():
            if held == name:
                parameter.copy_(self._shards.piece(name, whole))
                self.trained(parameter).copy_(self.piece(name, whole))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.specs:
            yield name, self._whole(name, self.trained)

    def _merged(self, adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
        dtype = next(self.causal_lm.parameters()).dtype
        for name in (name for name in self.model_specs if name not in self.buffers):
            yield name, self._model_shards.whole(name, lambda p: merge(p, self._layers[id(p)]), dtype)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        states: dict[Tensor, dict[str, Any]] = self.optimizer.unwrap().state
        if not states:
            return
        step = next(iter(states.values()))["step"].detach()

        def held(moment: str) -> Callable[[nn.Parameter], Tensor]:
            return lambda parameter: states[self.trained(parameter)][moment]

        for name in self.specs:
            if name in self.frozen:
                continue
            for moment in ("exp_avg", "exp_avg_sq"):
                yield f"{moment}/{name}", self._whole(name, held(moment))
            yield f"step/{name}", step.clone()

    def _whole(self, name: str, kept: Callable[[nn.Parameter], Tensor]) -> Tensor:
        """Gather a whole tensor from the pieces that `kept` returns for the ranks' parameters."""
        rows = self._rows
        if rows is None or name in self.frozen:
            return self._shards.whole(name, lambda p: kept(p).detach().to(self.dtype), self.dtype)
        # ZeRO's rows are float32 under any precision.
        return self._shards.whole(name, lambda p: rows.join(kept(p), p.shape), torch.float32)
