"""Whether `hybrid_parallel` can cut a model, and whether it did so rightly."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from quartet_trainer.batches import MicroBatch
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.attention import trunk
from quartet_trainer.learner.plugins.sharding_policy import COLUMNS, HEAD_NORMS, ROWS
from quartet_trainer.learner.policy import Policy
from quartet_trainer.plugin_settings import PluginSettings

_FAMILIES = "models of Llama's form, as Llama, Qwen2, Qwen3, Mistral, Granite and OLMo are"


def check_modules(causal_lm: PreTrainedModel, settings: PluginSettings) -> None:
    """Raise LearnerError if a model has not the modules that `ShardingPolicy` cuts."""
    base, kind = trunk(causal_lm), causal_lm.config.model_type
    parts = [(base, "embed_tokens"), (base, "layers"), (base, "norm"), (causal_lm, "lm_head")]
    if missing := [name for module, name in parts if not hasattr(module, name)]:
        raise LearnerError(
            f"plugin 'hybrid_parallel' spreads {_FAMILIES}; a {kind!r} model has no {missing[0]}: use "
            "plugin 'torch_fsdp'"
        )
    if settings.tp_size > 1 and (strange := _not_cut(base)):
        raise LearnerError(
            f"trainer.tp_size {settings.tp_size} shares out {_FAMILIES}, not {strange} of a {kind!r} model; allowed "
            "with it: trainer.tp_size 1, or plugin 'torch_fsdp'"
        )


def _not_cut(base: nn.Module) -> str:
    """A module of which `ShardingPolicy` would make something else, or nothing; empty if there is none."""
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
    """A micro-batch of two short sequences, and the log-probs [14] that the whole model gives its tokens."""
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
    """Compare the log-probs [t] of a sharded model with the whole one's. All ranks call.

    Args:
        found, expected: of the same tokens.
        precision: what the sharded model computes in.
        last: whether `found` means anything on this rank: it is of a pipeline's last stage.

    Raises:
        LearnerError: they differ, on whichever rank.
    """
    allowed = (0.1 if precision == "bf16" else 1e-3) * float(expected.abs().max())
    differs = (found.cpu() - expected.to(found.dtype)).abs().max().nan_to_num(torch.inf) if last else torch.tensor(0.0)
    worst = differs.float().reshape(1).to(found.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if worst.item() > allowed:
        raise LearnerError(
            f"plugin 'hybrid_parallel' gives this model other log-probs than the whole model has: they differ by "
            f"{worst.item():.3g}; such models cannot be spread by it: use plugin 'torch_fsdp'"
        )
