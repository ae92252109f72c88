"""Log-probs and entropy over a divided vocabulary, on one rank, against torch's own; several ranks: `test_plugins`."""

from __future__ import annotations

import torch
import torch.distributed as dist

from quartet_trainer.learner import distributed
from quartet_trainer.learner.plugins.stage import vocab_parallel_log_probs


def test_against_autograd_with_padded_columns() -> None:
    distributed.initialize(seed=0)
    torch.manual_seed(3)
    vocabulary, padded = 11, 16
    logits = (20 * torch.randn(6, padded, dtype=torch.float64)).requires_grad_()
    targets = torch.tensor([0, 10, 3, 3, 7, 1])
    log_probs, entropy = vocab_parallel_log_probs(logits, targets, 0, vocabulary, dist.group.WORLD)

    real = torch.log_softmax(logits[:, :vocabulary], dim=-1)
    expected = real.gather(-1, targets[:, None]).squeeze(-1), -(real.exp() * real).sum(-1)
    torch.testing.assert_close(log_probs, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-12, atol=1e-12)

    weights = torch.randn(2, 6, dtype=torch.float64)
    for ours, theirs in (
        ((weights[0] * log_probs).sum(), (weights[0] * expected[0]).sum()),
        ((weights[1] * entropy).sum(), (weights[1] * expected[1]).sum()),
    ):
        (found,) = torch.autograd.grad(ours, logits, retain_graph=True)
        (wanted,) = torch.autograd.grad(theirs, logits, retain_graph=True)
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
        assert torch.equal(found[:, vocabulary:], torch.zeros(6, padded - vocabulary, dtype=torch.float64))


def test_huge_logits_stay_finite() -> None:
    distributed.initialize(seed=0)
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(logits, torch.tensor([1, 2]), 0, 3, dist.group.WORLD)
    torch.testing.assert_close(log_probs, torch.tensor([-6e4, -1.0986123]))
    torch.testing.assert_close(entropy, torch.tensor([0.0, 1.0986123]))
    (log_probs.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()
