"""Patches that let ColossalAI 0.5.0 run on a CPU with the torch of our requirements. Each works around a defect.

1. `CpuAccelerator.get_rng_state` passes a device to torch's function, which takes none, and `manual_seed` raises.
   Sharded layers seed their parameters through them.
2. `torch.distributed.is_hccl_available` was removed from torch; the pipeline's point-to-point code still calls it.
3. `CpuAccelerator.Stream`, `stream` and `current_stream` raise. LowLevelZero creates a stream to communicate on, or
   uses the current one. A CPU has no streams, so these do nothing.
4. LowLevelZero's optimizer refuses to run on a CPU. With patch 3 it can.
5. TorchFSDPPlugin takes FSDP's device from torch.cuda. FSDP accepts a CPU, so without CUDA that is what it gets.
6. Gemini holds a chunk's shard in `cuda_shard` or `cpu_shard`, and computes from the first. With the CPU as its device
   it moves shards to the second and fails: there only the first is used.

None changes anything on a machine with CUDA: ColossalAI uses its CudaAccelerator there, and with NCCL never calls
`is_hccl_available`. Remove a patch when the pinned ColossalAI no longer needs it.

Importing ColossalAI sets CUDA_DEVICE_MAX_CONNECTIONS=1 for the process and its children, which puts the kernels of all
streams into one queue: sending weights would wait for training. The variable is restored before CUDA starts.
It also imports bitsandbytes, which compiles functions that are not used: a second, unless that is disabled meanwhile.

Warnings that a user can do nothing about are filtered: to install TensorNVMe, apex or kernels, and of ColossalAI's own
calls of deprecated functions.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

_WHILE_IMPORTED = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
_ADVICE = (
    "Please install the latest tensornvme",
    "Please install apex from source",
    "`broadcast_buffers` is deprecated",
    "`isinstance(treespec, LeafSpec)` is deprecated",
    "`torch.distributed.all_gather_into_tensor` is deprecated",
    "`torch.distributed.reduce_scatter_tensor` is deprecated",
    "TypedStorage is deprecated",
    "FSDP is switching to use `NO_SHARD`",
)


def apply() -> None:
    """Import ColossalAI and apply the patches; idempotent. Call before anything else imports ColossalAI."""
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=re.escape(message))
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
        lambda record: "kernels-community" not in record.getMessage()
    )
    before = {name: os.environ.get(name) for name in _WHILE_IMPORTED}
    os.environ.update(_WHILE_IMPORTED)
    import colossalai  # noqa: F401 - its imports warn too, so they happen under the filters above
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator
    from colossalai.booster.plugin import torch_fsdp_plugin
    from colossalai.zero.gemini.chunk import Chunk
    from colossalai.zero.low_level import LowLevelZeroOptimizer

    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value
    CpuAccelerator.get_rng_state = lambda self, device=None: torch.get_rng_state()
    CpuAccelerator.manual_seed = lambda self, seed: torch.default_generator.manual_seed(seed)
    CpuAccelerator.Stream = lambda self, device=None, priority=0, **kwargs: None
    CpuAccelerator.current_stream = lambda self, device=None: None
    CpuAccelerator.stream = lambda self, stream_: nullcontext()
    if not torch.cuda.is_available():
        LowLevelZeroOptimizer._sanity_checks = lambda self: None
        cpu = SimpleNamespace(current_device=lambda: torch.device("cpu"))
        torch_fsdp_plugin.torch = SimpleNamespace(**{**vars(torch), "cuda": cpu})  # for that module only
        _keep_shards(Chunk)
    if not hasattr(torch.distributed, "is_hccl_available"):
        torch.distributed.is_hccl_available = lambda: False


def _keep_shards(chunk: Any) -> None:
    """Apply patch 6 to the class `Chunk`."""
    close = chunk.close_chunk
    if close.__name__ != "close_chunk":
        return  # already patched

    def close_and_keep(self: Any) -> None:
        close(self)
        if not self.is_gathered and self.cuda_shard is None:
            self.cuda_shard, self.cpu_shard = self.cpu_shard, None

    chunk.close_chunk = close_and_keep
    chunk.shard_move = lambda self, device, force_copy=False, non_blocking=False: None
    chunk.device_type = property(lambda self: "cuda")
