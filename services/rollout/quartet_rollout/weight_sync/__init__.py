"""Receiving weights: what a member of the weight group does, in the process that installs them. Imports no torch.

    receiver.py  joins the group, receives buckets into reusable buffers and checksums them: Gloo, NCCL, safetensors
                 files, and transports of other packages
    adapters.py  merges a received LoRA adapter into the base weights: W0 + B A alpha / r

Nothing here changes a model: an engine installs the receiver's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class WeightGroupInfo:
    """An invitation to the process group of a group epoch."""

    transport: str
    """"gloo", "nccl", "file", or the name of another package's transport."""
    store_host: str
    """Host of the group's store, at the trainer."""
    store_port: int
    rank: int
    """First rank of this engine, >= 1; the trainer is rank 0 and sends."""
    world_size: int
    timeout_seconds: float
    """Deadline of the rendezvous and, unless a call brings its own, of each operation."""
    secret: bytes = field(repr=False)
    """Secret of the epoch, part of the store's key prefix."""
    epoch: int
    """The group epoch, >= 0."""
    invitation: Mapping[str, str] = field(default_factory=dict)
    """What the trainer's end of another package's transport sends to the end here."""
    interface: str = ""
    """Network interface to listen on; "": that of the route to the store."""
