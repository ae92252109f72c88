"""The pieces that algorithms are made of: pure functions of tensors, each a formula and its paper.

| module | holds |
|---|---|
| `advantages` | how good each completion is beside its group |
| `policy` | the clipped importance ratio |
| `kl` | the k3 estimator of a KL divergence |
| `correction` | truncated importance weights for the mismatch of rollout and trainer |
| `aggregation` | the weight of each token's loss in the batch's one number |

Shapes: N completions of B groups in the global batch, T completion tokens in all, stored one completion after another.
"""
