"""How the losses of tokens become one number: the weight of each token.

The batch's loss is the weighted sum of its token losses. The weights are made once, from the whole global batch,
before the first backward: so neither micro-batches nor ranks can change them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quartet_trainer.learner_settings import AggregationName


def token_weights(name: AggregationName, mask: Tensor, rows: Tensor, completions: int, length: int) -> Tensor:
    """The weight of each token, float64 [T]; 0 where `mask` is 0.

    | name | the loss is |
    |---|---|
    | token-mean | the mean over all tokens of the batch (DAPO) |
    | sequence-mean-token-mean | the mean over completions of their token means (GRPO's paper) |
    | sequence-mean-token-sum | the mean over completions of their token sums |
    | constant | the sum over all tokens / (completions * length) (Dr. GRPO) |

    Completions without any unmasked token are not counted, except by "constant", whose divisor never varies.

    Args:
        name: one of the above.
        mask: bool [T], the tokens that are trained.
        rows: int64 [T], the completion of each token.
        completions: how many the batch has, or the mini-batch whose tokens `mask` leaves; used by "constant" alone.
        length: longest completion the run allows, in tokens; used by "constant" alone.
    """
    trained = mask.double()
    tokens = torch.zeros(int(rows.max()) + 1 if rows.numel() else 0, dtype=torch.float64).index_add_(0, rows, trained)
    counted = (tokens > 0).sum().clamp(min=1)
    if name == "token-mean":
        return trained / tokens.sum().clamp(min=1)
    if name == "sequence-mean-token-mean":
        return trained / (tokens.clamp(min=1)[rows] * counted)
    if name == "sequence-mean-token-sum":
        return trained / counted
    if name == "constant":
        return trained / (completions * length)
    raise ValueError(f"aggregation: got {name!r}")
