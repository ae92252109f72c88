"""Loads a causal language model such that training computes the log-probs that the rollout's engine computes."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from quartet_common.log import get_logger
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.attention import use_packed_attention
from quartet_trainer.learner.policy import Policy

log = get_logger(__name__)

_CHECKED_LOGIT = 100.0
"""Largest logit of the check at load. A cap changes nothing while logits are small, as those of fresh weights are."""
_TOLERANCE = 1e-4 * _CHECKED_LOGIT


def load_causal_lm(path: Path, dtype: torch.dtype, *, share_prompts: bool = False) -> PreTrainedModel:
    """Load a model for training: from safetensors, without dropout (a policy's log-probs must be repeatable).

    Args:
        path: its folder.
        dtype: of its weights.
        share_prompts: have it take micro-batches with shared prompts, if it can.

    Raises:
        LearnerError: `Policy` computes other log-probs than the model itself, or random ones.
    """
    disable_progress_bar()  # a service's log has no use for it
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    _remove_randomness(config)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=dtype,
        experts_implementation="eager" if dtype == torch.float64 else None,  # torch's grouped products have no float64
        # torch's fused attention has no cap. None: fused where the family has it.
        attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
        use_safetensors=True,
        local_files_only=True,
    )
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager"
        ).eval()
    for name, parameter in fresh.named_parameters():  # `from_pretrained` trains those that the family does not
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    _check_log_probs(model, fresh)
    if share_prompts and not use_packed_attention(model):
        log.info(f"{type(model).__name__} attends in a way of its own: prompts are computed for each completion")
    return model


def _remove_randomness(config: PretrainedConfig) -> None:
    """Set every rate of dropout, layer drop and router jitter to 0: some families read it in each forward pass."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _remove_randomness(value)
        elif type(value) in (int, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, type(value)(0))  # a configuration checks the types of its values


def _check_log_probs(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Compare `Policy` in training mode with the family's own forward pass in evaluation mode, with eager attention.

    The output layer's logits are scaled up for it, in both alike. `reference` is a model on the meta device, whose
    tensors are the model's for it.
    """
    tokens = torch.arange(8)[None] % model.config.vocab_size
    targets, positions = tokens[0, 1:], torch.arange(7)
    policy, scale = Policy(model), 1.0
    for name, module in reference.named_modules():  # those that are no buffers, as rotary frequencies may be
        held = vars(model.get_submodule(name))
        vars(module).update({key: value for key, value in held.items() if isinstance(value, Tensor)})
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def logits() -> Tensor:
        return functional_call(reference, tensors, (), {"input_ids": tokens, "use_cache": False}).logits[0, :-1].float()

    def log_probs() -> Tensor:
        return policy(tokens, torch.zeros(7).long(), positions, None, targets, torch.ones(7))[0].float()

    hooks = [
        each.get_output_embeddings().register_forward_hook(lambda module, args, output: output * scale)
        for each in {reference, model}
    ]
    with torch.no_grad():
        scale = _CHECKED_LOGIT / float(logits().abs().max().clamp(min=1e-6))
        expected = torch.log_softmax(logits(), dim=-1)[positions, targets]
        model.train()
        first, second = log_probs(), log_probs()
        model.eval()
    for hook in hooks:
        hook.remove()
    name = type(model).__name__
    differs = float((first - second).abs().max())
    if differs > _TOLERANCE:  # kernels may round differently from pass to pass
        raise LearnerError(
            f"{name} draws random numbers in training: two forward passes differ by {differs:.3g}, "
            "although each dropout and jitter of its config.json is set to 0; such models cannot be trained"
        )
    differs = float((first - expected).abs().max())
    if not differs <= _TOLERANCE:
        raise LearnerError(
            f"{name} has other log-probs in training than its own forward pass with eager attention: "
            f"they differ by {differs:.3g} where logits reach {_CHECKED_LOGIT:g}; such models cannot be trained yet"
        )
