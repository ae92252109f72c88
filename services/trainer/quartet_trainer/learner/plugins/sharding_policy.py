"""How ColossalAI's ShardFormer shards a decoder of Llama's form: Llama, Qwen2, Qwen3, Mistral, Granite, OLMo, others.

ColossalAI 0.5.0's own policies replace forward functions of the transformers release that they were written for. This
one replaces parameters only: embedding, linear layers and head become ColossalAI's sharded ones, and under a pipeline
the modules of other stages lose their parameters. The model's own forward runs on every rank; see `Stage`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, SubModuleReplacementDescription
from colossalai.shardformer.policies.base_policy import Policy as ShardformerPolicy
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_trainer.batch import MicroBatch
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.attention import trunk
from quartet_trainer.learner.model import Policy
from quartet_trainer.learner_settings import LearnerSettings

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Linear layers sharded by output: each rank computes some columns."""
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Linear layers sharded by input: they take those columns, and their outputs are summed over the ranks."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of one head's queries or keys: not sharded; each rank applies them to its own heads."""


class ShardingPolicy(ShardformerPolicy):
    """For one model: `HybridParallelPlugin` and `ShardFormer` each need a new instance."""

    def config_sanity_check(self) -> None:
        """Do nothing: `checks.check_model` has checked the model."""

    def preprocess(self) -> nn.Module:
        """Return the model unchanged."""
        return self.model

    def module_policy(self) -> dict[type[nn.Module], ModulePolicyDescription]:
        """The replacements of submodules, by the class of the parent module."""
        if not self.shard_config.enable_tensor_parallelism:
            return {}
        base = trunk(self.model)
        kinds = {**dict.fromkeys(COLUMNS, Linear1D_Col), **dict.fromkeys(ROWS, Linear1D_Row)}
        inner = [SubModuleReplacementDescription(name, kind, ignore_if_not_exist=True) for name, kind in kinds.items()]
        embedding = SubModuleReplacementDescription(
            "embed_tokens", VocabParallelEmbedding1D, {"make_vocab_size_divisible_by": 1}
        )
        head = SubModuleReplacementDescription("lm_head", Linear1D_Col)
        return {
            **{type(layer): ModulePolicyDescription(sub_module_replacement=inner) for layer in base.layers},
            type(base): ModulePolicyDescription(sub_module_replacement=[embedding]),
            type(self.model): ModulePolicyDescription(sub_module_replacement=[head]),
        }

    def postprocess(self) -> nn.Module:
        """Sum the gradients of `HEAD_NORMS` over the tensor-parallel ranks."""
        if self.shard_config.enable_tensor_parallelism:
            add_up = partial(_sum, group=self.shard_config.tensor_parallel_process_group)
            for name, parameter in trunk(self.model).layers.named_parameters():
                if name.partition(".")[2].rpartition(".")[0] in HEAD_NORMS and parameter.requires_grad:
                    parameter.register_hook(add_up)
        return self.model

    def get_held_layers(self) -> list[nn.Module]:
        """The modules of this stage."""
        base, stages = trunk(self.model), self.pipeline_stage_manager
        start, end = stages.get_stage_index(stages.distribute_layers(len(base.layers)))
        everywhere = [m for name, m in base.named_children() if name not in ("embed_tokens", "layers", "norm")]
        first = [base.embed_tokens] if stages.is_first_stage() else []
        last = [base.norm, self.model.lm_head] if stages.is_last_stage() else []
        return [*everywhere, *first, *base.layers[start:end], *last]

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        """The matrix of a tied head, which both the first and the last stage hold."""
        stages = self.pipeline_stage_manager
        if stages is None or stages.num_stages == 1 or not self.tie_weight_check():
            return []
        return [{0: trunk(self.model).embed_tokens.weight, stages.num_stages - 1: self.model.lm_head.weight}]


def _sum(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total


_FAMILIES = "models of Llama's form, as Llama, Qwen2, Qwen3, Mistral, Granite and OLMo are"


def check_modules(causal_lm: PreTrainedModel, settings: LearnerSettings) -> None:
    """Raise LearnerError if a model's modules are not those that `ShardingPolicy` shards."""
    base, kind = trunk(causal_lm), causal_lm.config.model_type
    parts = [(base, "embed_tokens"), (base, "layers"), (base, "norm"), (causal_lm, "lm_head")]
    if missing := [name for module, name in parts if not hasattr(module, name)]:
        raise LearnerError(
            f"plugin 'hybrid_parallel' spreads {_FAMILIES}; a {kind!r} model has no {missing[0]}: use "
            "plugin 'torch_fsdp'"
        )
    if settings.tp_size > 1 and (strange := _unsupported_module(base)):
        raise LearnerError(
            f"trainer.tp_size {settings.tp_size} shares out {_FAMILIES}, not {strange} of a {kind!r} model; allowed "
            "with it: trainer.tp_size 1, or plugin 'torch_fsdp'"
        )


def _unsupported_module(base: nn.Module) -> str:
    """A module that `ShardingPolicy` would shard wrongly or not at all; empty if there is none."""
    if type(base.embed_tokens) is not nn.Embedding:
        return "embed_tokens"
    size = getattr(base.config, "head_dim", None) or base.config.hidden_size // base.config.num_attention_heads
    for name, parameter in base.layers.named_parameters():
        inner = name.partition(".")[2]
        module = inner.rpartition(".")[0]
        of_a_head = module in HEAD_NORMS and parameter.numel() == size
        of_the_layer = parameter.ndim == 1 and "." not in module
        if not (module in (*COLUMNS, *ROWS) or of_a_head or of_the_layer):
            return inner
    return ""


def probe(causal_lm: PreTrainedModel) -> tuple[MicroBatch, Tensor]:
    """A micro-batch of two short sequences, and the whole model's log-probs [14] of its tokens."""
    tokens = torch.arange(16).view(2, 8) * 7 % causal_lm.config.vocab_size
    rows, columns = torch.arange(2).repeat_interleave(7), torch.arange(7).repeat(2)
    numbers = torch.arange(14)
    micro_batch = MicroBatch(
        input_ids=tokens,
        rows=rows,
        columns=columns,
        targets=tokens[rows, columns + 1],
        sequences=rows,
        tokens=numbers,
        temperatures=torch.ones(14),
        rollout_log_probs=torch.zeros(14),
        advantages=torch.zeros(14),
        weights=torch.zeros(14),
    )
    with torch.no_grad():
        return micro_batch, Policy(causal_lm)(*micro_batch.inputs)[0]


def check_log_probs(found: Tensor, expected: Tensor, precision: str, last: bool) -> None:
    """Compare the log-probs [t] of a sharded model with those of the whole model. All ranks call.

    Args:
        found, expected: of the same tokens.
        precision: of the sharded model.
        last: whether this rank is of a pipeline's last stage; on others `found` is ignored.

    Raises:
        LearnerError: they differ on some rank; raised on every rank.
    """
    allowed = (0.1 if precision == "bf16" else 1e-3) * float(expected.abs().max())
    differs = (found.cpu() - expected.to(found.dtype)).abs().max().nan_to_num(torch.inf) if last else torch.tensor(0.0)
    worst = differs.float().reshape(1).to(found.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if worst.item() > allowed:
        raise LearnerError(
            f"plugin 'hybrid_parallel' computes other log-probs than this model has when it is whole: they differ "
            f"by {worst.item():.3g}; use plugin 'torch_fsdp'"
        )
