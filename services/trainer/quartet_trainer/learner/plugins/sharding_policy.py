"""How ColossalAI's ShardFormer cuts a decoder of Llama's form: Llama, Qwen2, Qwen3, Mistral, Granite, OLMo and others.

ColossalAI 0.5.0's own policies replace the forwards of the transformers release that they were written for. This one
replaces parameters alone: embedding, linear layers and head by ColossalAI's sharded ones, and under a pipeline all that
another stage holds by nothing. The model's own forward runs everywhere; `Stage` says how.
"""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from colossalai.shardformer.layer import Linear1D_Col, Linear1D_Row, VocabParallelEmbedding1D
from colossalai.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from torch import Tensor, nn

from quartet_trainer.learner.attention import trunk

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
"""Linear layers of which each rank has some of the outputs."""
ROWS = ("self_attn.o_proj", "mlp.down_proj")
"""Linear layers that take those outputs, and add up over the ranks."""
HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of one head's queries or keys: whole on each rank, which sees its own heads only."""


class ShardingPolicy(Policy):
    """For one model: `HybridParallelPlugin` and `ShardFormer` each take a new one."""

    def config_sanity_check(self) -> None:
        """Nothing: `hybrid_checks.check_model` was asked before."""

    def preprocess(self) -> nn.Module:
        """The model as it came."""
        return self.model

    def module_policy(self) -> dict[type[nn.Module], ModulePolicyDescription]:
        """What takes the place of what, by the class of the module that it is in."""
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
        """Have the gradients of `HEAD_NORMS` summed over the tensor-parallel ranks."""
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
        """The matrix of a tied head, which the first and the last stage have."""
        stages = self.pipeline_stage_manager
        if stages is None or stages.num_stages == 1 or not self.tie_weight_check():
            return []
        return [{0: trunk(self.model).embed_tokens.weight, stages.num_stages - 1: self.model.lm_head.weight}]


def _sum(gradient: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = gradient.clone()
    dist.all_reduce(total, group=group)
    return total
