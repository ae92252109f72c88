"""The policy: a causal language model that returns the log-probs of chosen tokens.

`load_causal_lm` loads it so that training computes the same log-probs as the rollout's engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils.logging import disable_progress_bar

from quartet_common.log import get_logger
from quartet_trainer.batch import MicroBatch
from quartet_trainer.batch.collate import Packing
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.attention import base_output, trunk, use_packed_attention
from quartet_trainer.learner.checks import CRITIC_KEY
from quartet_trainer.learner.router import RouterStatistics
from quartet_weights.routed_experts import RecordExperts, ReplayExperts, Routing

log = get_logger(__name__)


def untied_names(model: nn.Module) -> list[str]:
    """Names of the state dict in order, without those that share an earlier tensor's storage, as a tied `lm_head`."""
    seen: set[int] = set()
    names = []
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            seen.add(tensor.data_ptr())
            names.append(name)
    return names


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Replace a model's parameters by empty ones, whose memory the system allocates when they are written to."""
    for parameter in model.parameters():
        parameter.data = torch.empty_like(parameter)
    return model


def is_converted(model: PreTrainedModel) -> bool:
    """Whether transformers converts a folder's tensors: stacks a layer's experts, or renames some of them."""
    return bool(getattr(model, "_weight_conversions", None))


def as_in_files(model: PreTrainedModel, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Convert whole tensors of a model to the names and shapes of its family's files, which vLLM uses too."""
    if not is_converted(model):
        yield from tensors
        return
    for name, tensor in tensors:
        yield from revert_weight_conversion(model, {name: tensor}).items()


def shapes_in_files(model: PreTrainedModel, specs: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """Names and shapes of what `as_in_files` yields, from those of the model's own tensors."""
    empty = ((name, torch.empty(shape, device="meta")) for name, shape in specs.items())
    return {name: tensor.shape for name, tensor in as_in_files(model, empty)}


class ValueHead(nn.Linear):
    """A linear layer from hidden states to one number, initialized to 0."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(hidden_size, 1, dtype=dtype)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """From states [t, H] to values [t], in float32 under any `precision`: bf16 would round their differences away.

        States in float64 give values in float64.
        """
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        return nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), self.bias.to(dtype)).squeeze(-1)


LOGITS_AT_ONCE = 2**26
"""Logits (tokens * vocabulary) held in memory at once: 256 MiB of float32."""


Head = Callable[..., tuple[Tensor, Tensor]]
"""From hidden states [t, H], targets [t] and temperatures [t] to log-probs [t] and entropy [t]."""


def in_chunks(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    columns: int,
    mask_counts: Tensor | None = None,
    mask_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `head` of t tokens with at most `LOGITS_AT_ONCE` logits in memory. Several chunks are recomputed in the
    backward pass.

    Args:
        head, hidden, targets, temperatures: see `Head`.
        columns: logits of one token on this rank.
        mask_counts, mask_ids: passed to `head` too, if given; see `MicroBatch`.
    """
    tokens_at_once = max(1, LOGITS_AT_ONCE // columns)
    values = [hidden, targets, temperatures]
    if targets.numel() <= tokens_at_once:
        return head(*values) if mask_counts is None else head(*values, mask_counts, mask_ids)
    parts = [value.split(tokens_at_once) for value in values]
    if mask_counts is not None and mask_ids is not None:
        counts = mask_counts.split(tokens_at_once)
        parts += [counts, mask_ids.split([int(part.sum()) for part in counts])]
    chunks = [checkpoint(head, *part, use_reentrant=False) for part in zip(*parts, strict=True)]
    log_probs, entropy = zip(*chunks, strict=True)
    return torch.cat(log_probs), torch.cat(entropy)


def left_out(counts: Tensor, ids: Tensor, vocabulary: int) -> Tensor:
    """bool [t, vocabulary]: true for ids that are not among a token's candidates.

    Args:
        counts: int64 [t]: candidates of each token; 0: all of the vocabulary.
        ids: int64 [sum of counts]: the candidates of one token after another.
    """
    out = (counts > 0)[:, None].repeat(1, vocabulary)
    out[torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts), ids] = False
    return out


def after_output_layer(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """Transform logits as the family does after its output layer: Cohere and Granite scale, Gemma 2 caps them."""
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    if scale != 1.0:
        logits = logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager:
    """Autocast matrix products to `dtype`; None: no autocast."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class Policy(nn.Module):
    """A causal language model that computes logits only for chosen tokens, and in chunks (see `in_chunks`)."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        autocast: torch.dtype | None = None,
        *,
        entropy_gradient: bool = False,
        value_head: ValueHead | None = None,
        router: RouterStatistics | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            causal_lm: transformers' model with its head.
            autocast: dtype of matrix products; None: the weights' own.
            entropy_gradient: whether the entropy has a gradient too, which costs memory.
            value_head: computes values from the model's hidden states; None: no values.
            router: for a mixture of experts, counts the experts of tokens in passes with gradient.
            routing: the model's, if `forward` gets `routed_experts`; None: the routers choose.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self.value_head = value_head
        self._router = router
        self._routing = routing
        self._autocast_dtype = autocast
        self._entropy_gradient = entropy_gradient

    def forward(
        self,
        input_ids: Tensor,
        rows: Tensor,
        columns: Tensor,
        packing: Packing | None,
        targets: Tensor,
        temperatures: Tensor,
        mask_counts: Tensor | None = None,
        mask_ids: Tensor | None = None,
        routed_experts: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute log-probs of t tokens, the entropies of their distributions, and with a value head the values.

        Args:
            input_ids: int64 [M, L], padded on the right, or with `packing` [1, L].
            rows: int64 [t], in [0, M).
            columns: int64 [t], in [0, L): the position whose output predicts the token.
            packing: with shared prompts, the sequences that the row's tokens belong to.
            targets: int64 [t]: the token.
            temperatures: float [t]: the logits are divided by it.
            mask_counts: int64 [t]: how many candidates the distribution is confined to; 0: all of the vocabulary.
            mask_ids: int64 [sum of the counts]: their ids, the target among them.
            routed_experts: integers [M * L, hidden layers, experts of a token]: the experts of each position.

        Returns:
            log_probs [t] with gradient and entropy [t], in nats, and with a value head the value [t], with gradient, of
            the state in which each token was chosen; float32, or float64 for a float64 model.
        """
        hidden = self._hidden(input_ids, rows, columns, packing, routed_experts)
        columns_of_head = self.causal_lm.config.vocab_size
        chosen = in_chunks(self._head, hidden, targets, temperatures, columns_of_head, mask_counts, mask_ids)
        return chosen if self.value_head is None else (*chosen, self.value_head(hidden))

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """The values [t] alone, as `forward` computes them. There must be a value head."""
        assert self.value_head is not None
        return self.value_head(self._hidden(*micro_batch.states, micro_batch.routed_experts))

    def _hidden(
        self,
        input_ids: Tensor,
        rows: Tensor,
        columns: Tensor,
        packing: Packing | None,
        routed_experts: Tensor | None,
    ) -> Tensor:
        """The states [t, H]."""
        router = self._router if self._router and self._router.counts and torch.is_grad_enabled() else None
        wanted = {"output_router_logits": True} if router else {}
        ran: RecordExperts | ReplayExperts | None = router.routing.record() if router else None
        if self._routing is not None and routed_experts is not None:
            ran = ReplayExperts(self._routing, routed_experts)
        with autocast_to(self._autocast_dtype, input_ids.device), ran or nullcontext():
            output = base_output(trunk(self.causal_lm), input_ids, packing, **wanted)
        if router and ran:
            router.add(output.router_logits, rows * input_ids.shape[1] + columns, ran)
        return output.last_hidden_state[rows, columns]

    def _head(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        mask_counts: Tensor | None = None,
        mask_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        with autocast_to(self._autocast_dtype, hidden.device):
            logits = self.causal_lm.get_output_embeddings()(hidden)
        if logits.dtype != torch.float64:
            logits = logits.float()
        logits = after_output_layer(logits, self.causal_lm.config).div_(temperatures[:, None])
        if mask_counts is not None and mask_ids is not None:
            # Not minus infinity: the entropy would be -inf * 0 = NaN.
            nothing = torch.finfo(logits.dtype).min / 2
            logits = logits.masked_fill(left_out(mask_counts, mask_ids, logits.shape[-1]), nothing)
        distribution = torch.log_softmax(logits, dim=-1)
        log_probs = distribution.gather(-1, targets[:, None]).squeeze(-1)
        if self._entropy_gradient:
            return log_probs, -(distribution.exp() * distribution).sum(-1)
        with torch.no_grad():
            return log_probs, -distribution.exp().mul_(distribution).sum(-1)


_CHECKED_LOGIT = 100.0
"""Largest logit in the check at load: small logits, as of fresh weights, would not reach a cap."""
_TOLERANCE = 1e-4 * _CHECKED_LOGIT


def load_causal_lm(
    path: Path, dtype: torch.dtype, *, share_prompts: bool = False, critic: bool = False
) -> PreTrainedModel:
    """Load a model for training, from safetensors and without dropout: a policy's log-probs must be repeatable.

    Args:
        path: its folder.
        dtype: of its weights.
        share_prompts: prepare it for micro-batches with shared prompts, if its attention allows that.
        critic: it is the critic's model, which needs no output matrix.

    Raises:
        LearnerError: tensors are missing, or `Policy` computes other log-probs than the model's own forward pass, or
            random ones.
    """
    disable_progress_bar()
    key = CRITIC_KEY if critic else "model.path"
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    _remove_randomness(config)
    model, loaded = AutoModelForCausalLM.from_pretrained(
        path,
        output_loading_info=True,
        config=config,
        dtype=dtype,
        experts_implementation="eager" if dtype == torch.float64 else None,  # torch's grouped matmul has no float64
        # torch's fused attention has no softcap. None: fused attention if the family has it.
        attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
        use_safetensors=True,
        local_files_only=True,
    )
    missing = sorted(name for name in loaded["missing_keys"] if not (critic and name.startswith("lm_head")))
    if missing:  # transformers draws them at random
        cure = " or set tie_word_embeddings = true in its config.json," if "lm_head.weight" in missing else ""
        raise LearnerError(
            f"{key}: the weights in '{path}' lack {len(missing)} of the model's tensors, {missing[0]} among them; "
            f"copy the folder again,{cure} or save it with transformers"
        )
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and head.weight is not embedding.weight:
        raise LearnerError(
            f"{key}: config.json in '{path}' has tie_word_embeddings = true, and the weights have an output matrix "
            "(lm_head) other than the embedding; set it to false in config.json to use both, or remove lm_head.weight"
        )
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(
            copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager"
        ).eval()
    for name, parameter in fresh.named_parameters():  # `from_pretrained` unfreezes those that the family freezes
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    _check_log_probs(model, fresh)
    if share_prompts and not use_packed_attention(model):
        log.info(f"{type(model).__name__} has an attention of its own: prompts are computed for each completion")
    return model


def _remove_randomness(config: PretrainedConfig) -> None:
    """Set every rate of dropout, layer drop and router jitter to 0. Some families read them in each forward pass."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            _remove_randomness(value)
        elif type(value) in (int, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, type(value)(0))  # configurations validate types


def _check_log_probs(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Compare `Policy` in training mode with the family's own forward pass in evaluation mode, with eager attention.

    Both have their logits scaled up to `_CHECKED_LOGIT`. `reference`, a model on the meta device, is called with the
    model's tensors.
    """
    tokens = torch.arange(8)[None] % model.config.vocab_size
    targets, positions = tokens[0, 1:], torch.arange(7)
    policy, scale = Policy(model), 1.0
    for name, module in reference.named_modules():  # tensors that are not buffers, as some rotary frequencies
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
