"""Loads a causal language model such that training computes the log-probs that the rollout's engine computes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from quartet_common.log import get_logger
from quartet_trainer.learner.base import LearnerError
from quartet_trainer.learner.policy import Policy
from quartet_trainer.learner.shared_attention import use_shared_attention

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
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    _remove_randomness(config)
    _scale_rope_as_vllm(config)
    _mask_as_configured(config)
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        torch_dtype=dtype,
        # torch's fused attention has no cap. None: fused where the family has it.
        attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
        use_safetensors=True,
        local_files_only=True,
    )
    _check_log_probs(model)
    if share_prompts and not use_shared_attention(model):
        log.info(f"{type(model).__name__} attends in a way of its own: prompts are computed for each completion")
    return model


def _remove_randomness(config: PretrainedConfig) -> None:
    """Set every rate of dropout, layer drop and router jitter to 0: some families read it in each forward pass."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _remove_randomness(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)


def _scale_rope_as_vllm(config: PretrainedConfig) -> None:
    """transformers 4.51 ignores yarn's `factor`, and longrope's original length unless it is a key of its own."""
    scaling = getattr(config, "rope_scaling", None) or {}
    kind, original = scaling.get("rope_type", scaling.get("type")), scaling.get("original_max_position_embeddings")
    if kind == "yarn" and original and scaling.get("factor"):
        config.max_position_embeddings = round(original * scaling["factor"])
    elif kind == "longrope" and original and not hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = original


def _mask_as_configured(config: PretrainedConfig) -> None:
    """transformers 4.51 masks every layer of Qwen by `sliding_window`, whatever the keys beside it say."""
    if getattr(config, "use_sliding_window", True) is False:
        config.sliding_window = None
    full = getattr(config, "max_window_layers", 0)
    if full and config.sliding_window:
        if full < config.num_hidden_layers:
            raise LearnerError(
                f"config.json: max_window_layers is {full}; allowed where use_sliding_window is true: 0, or all "
                f"{config.num_hidden_layers} layers, as the trainer's attention has one window for all"
            )
        config.sliding_window = None


def _check_log_probs(model: PreTrainedModel) -> None:
    """Compare `Policy` in training mode with the family's own forward pass in evaluation mode, with eager attention.

    The output layer's logits are scaled up for it, in both alike.
    """
    tokens = torch.arange(8)[None] % model.config.vocab_size
    targets, positions = tokens[0, 1:], torch.arange(7)
    policy, scale = Policy(model), 1.0
    reference = model
    if model.config._attn_implementation != "eager":
        with torch.device("meta"):  # its tensors are the model's
            reference = AutoModelForCausalLM.from_config(
                model.config, torch_dtype=model.dtype, attn_implementation="eager"
            ).eval()
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
