"""Sends the trained weights to the rollouts.

`sync` is the loop's interface: one update at a time. `publisher` selects the rollouts to update and handles failures.
`group` forms a weight group and runs one update in it, through `transports` (files and plugins) or `process_group`
(Gloo and NCCL).
"""

from quartet_trainer.weight_sync.publisher import Published, Publisher

__all__ = ["Published", "Publisher"]
