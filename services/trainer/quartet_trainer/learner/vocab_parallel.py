"""Log-probs and entropy where each rank of a tensor-parallel group has the logits of its own part of the vocabulary.

For logits z over the whole vocabulary, with m their maximum and s = sum e^(z - m):

    log p(y) = z_y - m - log s                    d log p(y) / dz_j = [j = y] - p_j
    H = log s - sum (e^(z - m) / s) (z - m)       dH / dz_j = -p_j (log p_j + H)

m is reduced by MAX, then s, the entropy's sum and z_y (0 where the token is another rank's) in one SUM. Every rank
goes on with the same numbers, so its part of the gradient needs no further exchange.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_log_probs(
    logits: Tensor, targets: Tensor, first: int, vocabulary: int, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Log-probs of t tokens and the entropy of their distributions. All ranks of `group` call.

    Args:
        logits: float32 or float64 [t, v]: this rank's v columns. Columns at or above `vocabulary` are padding: they are
            no part of the distribution and get no gradient. At least one column of each rank is not.
        targets: int64 [t], in [0, vocabulary).
        first: the token of this rank's first column.
        vocabulary: tokens of the whole vocabulary.
        group: the tensor-parallel ranks.

    Returns:
        log_probs [t] and entropy [t], in nats, alike on every rank, both with gradient.
    """
    real = logits[:, : max(0, vocabulary - first)]
    return _VocabParallel.apply(real, targets - first, group)


class _VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        greatest = logits.max(dim=-1).values
        _reduce(greatest, dist.ReduceOp.MAX, group)
        shifted = logits - greatest[:, None]
        exponentials = shifted.exp()
        mine = (targets >= 0) & (targets < logits.shape[-1])
        column = torch.where(mine, targets, 0)[:, None]
        chosen = torch.where(mine, shifted.gather(-1, column).squeeze(-1), 0.0)
        sums = torch.stack([exponentials.sum(-1), (exponentials * shifted).sum(-1), chosen])
        _reduce(sums, dist.ReduceOp.SUM, group)
        log_sum = sums[0].log()
        entropy = log_sum - sums[1] / sums[0]
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), column, mine, entropy)
        return sums[2] - log_sum, entropy

    @staticmethod
    def backward(ctx: Any, grad_log_probs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None]:
        probabilities, column, mine, entropy = ctx.saved_tensors
        gradient = torch.zeros_like(probabilities)
        if grad_log_probs is not None:
            gradient -= probabilities * grad_log_probs[:, None]
            gradient.scatter_add_(-1, column, (grad_log_probs * mine)[:, None])
        if grad_entropy is not None:
            # xlogy: 0 where the probability is 0.
            own = torch.special.xlogy(probabilities, probabilities)
            gradient -= (own + probabilities * entropy[:, None]) * grad_entropy[:, None]
        return gradient, None, None


def _reduce(values: Tensor, operation: dist.ReduceOp, group: dist.ProcessGroup) -> None:
    if values.numel():
        dist.all_reduce(values, op=operation, group=group)
