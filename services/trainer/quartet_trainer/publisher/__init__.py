"""Weights on their way to the rollouts: a process group outside the default one, packed buckets, a checksum, deadlines.

| module | holds |
|---|---|
| `publisher` | `Publisher`: who needs which version, and what is done when one fails |
| `group` | `WeightStore`, `WeightGroup`: the private TCPStore and the Gloo group of one epoch |
| `transfer` | one update of one group: Begin at all, packed broadcast, Finish at all |
| `packing` | tensors into reused uint8 buckets |
| `calls` | one RPC to many rollouts at once, with a deadline and an eye on who dies |
"""

from quartet_trainer.publisher.publisher import Published, Publisher

__all__ = ["Published", "Publisher"]
