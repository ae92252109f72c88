"""What ColossalAI 0.5.0 needs on a CPU with the torch of our requirements. Defects of upstream, patched here alone.

1. `CpuAccelerator.get_rng_state`, `set_rng_state` and `manual_seed` pass on a device, or refuse to work, where the
   CPU's generator is meant: sharded layers seed their parameters through them.
2. `torch.distributed.is_hccl_available` was removed from torch; the pipeline's point-to-point code still asks for it.
3. `CpuAccelerator.Stream`, `stream` and `current_stream` refuse to work. LowLevelZero asks for a stream to communicate
   on, and uses the current one where it is told not to overlap. On a CPU there is one, of which nothing need be said.
4. LowLevelZero's optimizer refuses a CPU before it looks at its parameters. With 3, it works there.
5. TorchFSDPPlugin asks torch.cuda for FSDP's device. FSDP itself takes a CPU: that is the answer where CUDA is not.
6. Gemini has one place for a chunk's shard on the device and another on the CPU, and computes from the first alone.
   Where the device is the CPU it moves shards to the second and finds none: there the first is made the only one.

None touches a machine with CUDA: there ColossalAI takes its CudaAccelerator, and NCCL answers the second question
before it is asked. Remove a patch when the pinned ColossalAI no longer needs it.

Importing it sets CUDA_DEVICE_MAX_CONNECTIONS=1 for the process and its children, which puts the kernels of all streams
into one queue: weights that are sent would wait behind training. It is put back as it was, before CUDA starts.

Importing and using it also prints advice that is not for our users: to install TensorNVMe, apex and the kernels
package, and what is deprecated in its own calls. That is silenced here, message by message.
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

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
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
    """Import ColossalAI and apply the patches; again is harmless. Call before anything else imports ColossalAI."""
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=re.escape(message))
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
        lambda record: "kernels-community" not in record.getMessage()
    )
    before = os.environ.get(_CONNECTIONS)
    import colossalai  # noqa: F401 - everything that it imports on its way, under the filters above
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator
    from colossalai.booster.plugin import torch_fsdp_plugin
    from colossalai.zero.gemini.chunk import Chunk
    from colossalai.zero.low_level import LowLevelZeroOptimizer

    os.environ.pop(_CONNECTIONS, None)
    if before is not None:
        os.environ[_CONNECTIONS] = before
    CpuAccelerator.get_rng_state = lambda self, device=None: torch.get_rng_state()
    CpuAccelerator.set_rng_state = lambda self, new_state, device=None: torch.set_rng_state(new_state)
    CpuAccelerator.manual_seed = lambda self, seed: torch.default_generator.manual_seed(seed)
    CpuAccelerator.Stream = lambda self, device=None, priority=0, **kwargs: None
    CpuAccelerator.current_stream = lambda self, device=None: None
    CpuAccelerator.stream = lambda self, stream_: nullcontext()
    if not torch.cuda.is_available():
        LowLevelZeroOptimizer._sanity_checks = lambda self: None
        cpu = SimpleNamespace(current_device=lambda: torch.device("cpu"))
        torch_fsdp_plugin.torch = SimpleNamespace(**{**vars(torch), "cuda": cpu})  # in that module's eyes alone
        _keep_shards(Chunk)
    if not hasattr(torch.distributed, "is_hccl_available"):
        torch.distributed.is_hccl_available = lambda: False


def _keep_shards(chunk: Any) -> None:
    """Patch 6, of the class `Chunk`."""
    close = chunk.close_chunk
    if close.__name__ != "close_chunk":
        return  # it is patched

    def close_and_keep(self: Any) -> None:
        close(self)
        if not self.is_gathered and self.cuda_shard is None:
            self.cuda_shard, self.cpu_shard = self.cpu_shard, None

    chunk.close_chunk = close_and_keep
    chunk.shard_move = lambda self, device, force_copy=False, non_blocking=False: None
    chunk.device_type = property(lambda self: "cuda")
