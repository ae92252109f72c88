"""Weights on their way to the rollouts: groups of their own, packed buckets, a checksum, deadlines.

`sync` is what the loop uses, one update at a time; `publisher` decides which rollout gets which version, and what is
done when one fails. `group` makes a group of rollouts and updates it, by one of the `transports` (files and plugins) or
`process_group` (Gloo and NCCL).
"""

from quartet_trainer.weight_sync.publisher import Published, Publisher

__all__ = ["Published", "Publisher"]
