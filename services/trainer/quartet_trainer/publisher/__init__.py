"""Weights on their way to the rollouts: groups of their own, packed buckets, a checksum, deadlines.

| module | holds |
|---|---|
| `publisher` | `Publisher`: who needs which version, and what is done when one fails |
| `group` | `WeightGroup`: the members of one epoch, and how they are invited |
| `store` | `WeightStore`: where the ranks of an epoch meet |
| `transfer` | one update of one group: Begin at all, the tensors, Finish at all |
| `transport` | what a transport is, and which there are: `process_group` (Gloo and NCCL), `files` |
| `packaged` | the trainer's end of a transport that another package brings |
| `pipeline` | packing, sending and checksumming at once, for transports that broadcast |
| `packing` | tensors into reused uint8 buckets |
| `calls` | one RPC to many rollouts at once, with a deadline and an eye on who dies |
"""

from quartet_trainer.publisher.publisher import Published, Publisher

__all__ = ["Published", "Publisher"]
