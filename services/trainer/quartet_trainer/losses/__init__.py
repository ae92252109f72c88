"""The pieces that algorithms are made of: pure functions of tensors, each a formula and its paper.

| module | holds |
|---|---|
| `advantages` | how good each completion is beside its group |
| `returns` | rewards of tokens, returns-to-go, GAE, whitening |
| `policy` | the clipped importance ratio, of tokens or of completions; CISPO's bounded weight |
| `value` | the critic's clipped loss |
| `kl` | the k1, k2 and k3 estimators of a KL divergence |
| `correction` | importance weights for the mismatch of rollout and trainer: truncated or masked |
| `aggregation` | the weight of each token's loss in the batch's one number |

Shapes: N completions of B groups in the global batch, T completion tokens in all, stored one completion after another.
"""
