"""The policy: a causal language model that gives the log-probs of chosen tokens and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from quartet_trainer.batches.shared_prompts import Packing
from quartet_trainer.learner.attention import base_output, trunk
from quartet_trainer.learner.router import RouterStatistics
from quartet_trainer.learner.value_head import ValueHead

LOGITS_AT_ONCE = 2**26
"""Logits (tokens * vocabulary) that may stand in memory at once: 256 MiB of float32."""


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
    """`head` of t tokens, so that at most `LOGITS_AT_ONCE` logits stand in memory: each chunk's are computed again in
    the backward pass.

    Args:
        head, hidden, targets, temperatures: see `Head`.
        columns: logits of one token on this rank.
        mask_counts, mask_ids: handed to `head` too, where they are given; see `MicroBatch`.
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
    """bool [t, vocabulary]: what is not among a token's candidates.

    Args:
        counts: int64 [t]; 0: nothing is left out.
        ids: int64 [sum of counts], one token's after another's.
    """
    out = (counts > 0)[:, None].repeat(1, vocabulary)
    out[torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts), ids] = False
    return out


def after_output_layer(logits: Tensor, config: PretrainedConfig) -> Tensor:
    """What a family makes of its output layer's logits: Cohere and Granite scale them, Gemma 2 caps them."""
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    if scale != 1.0:
        logits = logits * scale
    cap = getattr(config, "final_logit_softcapping", None)
    return torch.tanh(logits / cap) * cap if cap else logits


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager:
    """Matrix products as `dtype`; None: as they are."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


class Policy(nn.Module):
    """Logits exist only for the tokens asked for, and for long batches only a chunk at a time."""

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        autocast: torch.dtype | None = None,
        *,
        entropy_gradient: bool = False,
        value_head: ValueHead | None = None,
        router: RouterStatistics | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            causal_lm: transformers' model with its head.
            autocast: dtype of matrix products, where it is not the weights' own.
            entropy_gradient: whether the entropy has a gradient too, which costs memory.
            value_head: of the model's hidden states, if values are wanted too.
            router: what counts where the tokens of passes with gradient go, in a mixture of experts.
        """
        super().__init__()
        self.causal_lm = causal_lm
        self.value_head = value_head
        self._router = router
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
    ) -> tuple[Tensor, ...]:
        """Log-probs of t tokens, the entropy of the distributions they were drawn from, and with a head the values.

        Args:
            input_ids: int64 [M, L], padded on the right, or with `packing` [1, L].
            rows: int64 [t], in [0, M).
            columns: int64 [t], in [0, L): the position whose output predicts the token.
            packing: how a row's tokens make sequences, where prompts are shared.
            targets: int64 [t]: the token.
            temperatures: float [t]: the logits are divided by it.
            mask_counts: int64 [t]: the candidates to which the distribution is confined; 0: all of the vocabulary.
            mask_ids: int64 [sum of the counts]: their ids, the target among them.

        Returns:
            log_probs [t] with gradient and entropy [t], in nats, and where there is a value head the value [t], with
            gradient, of each state in which a token was chosen; float32, or float64 for a float64 model.
        """
        hidden = self._hidden(input_ids, rows, columns, packing)
        columns_of_head = self.causal_lm.config.vocab_size
        chosen = in_chunks(self._head, hidden, targets, temperatures, columns_of_head, mask_counts, mask_ids)
        return chosen if self.value_head is None else (*chosen, self.value_head(hidden))

    def values(self, input_ids: Tensor, rows: Tensor, columns: Tensor, packing: Packing | None) -> Tensor:
        """The values [t] alone, as `forward` gives them; there must be a head."""
        if self.value_head is None:
            raise RuntimeError("this policy has no value head")
        return self.value_head(self._hidden(input_ids, rows, columns, packing))

    def _hidden(self, input_ids: Tensor, rows: Tensor, columns: Tensor, packing: Packing | None) -> Tensor:
        """The states [t, H]."""
        router = self._router if torch.is_grad_enabled() else None
        wanted = {"output_router_logits": True} if router else {}
        with autocast_to(self._autocast_dtype, input_ids.device):
            output = base_output(trunk(self.causal_lm), input_ids, packing, **wanted)
        if router:
            router.add(output.router_logits, rows * input_ids.shape[1] + columns)
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
            # Finite: an entropy of minus infinity times 0 would be no number.
            nothing = torch.finfo(logits.dtype).min / 2
            logits = logits.masked_fill(left_out(mask_counts, mask_ids, logits.shape[-1]), nothing)
        distribution = torch.log_softmax(logits, dim=-1)
        log_probs = distribution.gather(-1, targets[:, None]).squeeze(-1)
        if self._entropy_gradient:
            return log_probs, -(distribution.exp() * distribution).sum(-1)
        with torch.no_grad():
            return log_probs, -distribution.exp().mul_(distribution).sum(-1)
