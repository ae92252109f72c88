"""Whether NCCL can be used in this process, and its version."""

from __future__ import annotations


def why_not() -> str:
    """Return why NCCL cannot be used in this process, in one sentence, or nothing. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        return "there is no CUDA GPU on this machine: use the transport gloo or file"
    if not torch.distributed.is_nccl_available():
        return "this build of torch has no NCCL: use the transport gloo or file"
    return ""


def version() -> str:
    """Return the version of torch's NCCL, e.g. "2.29.7"."""
    import torch

    return ".".join(str(part) for part in torch.cuda.nccl.version())
