"""Sends the trained weights to the rollouts.

`Publisher._update` is one update from Begin to Finish: read it first. `publisher` selects the rollouts, retries and
runs updates beside the training; `rollouts` has what is known of them; `transports` forms the weight group of an epoch
and sends the buckets that `packing` fills.
"""

from quartet_trainer.weight_sync.publisher import Published, Publisher

__all__ = ["Published", "Publisher"]
