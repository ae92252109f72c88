"""What ColossalAI 0.5.0 needs on a CPU with the torch of our requirements. Defects of upstream, cured here alone.

1. `CpuAccelerator.get_rng_state`, `set_rng_state` and `manual_seed` pass on a device, or refuse to work, where the
   CPU's generator is meant: sharded layers seed their parameters through them.
2. `torch.distributed.is_hccl_available` was removed from torch; the pipeline's point-to-point code still asks for it.

Neither touches a machine with CUDA: there ColossalAI takes its CudaAccelerator, and NCCL answers the second question
before it is asked. Remove a cure when the pinned ColossalAI no longer needs it.

Importing and using it also prints advice that is not for our users: to install TensorNVMe, apex and the kernels
package, and what is deprecated in its own calls: DDP's `broadcast_buffers`, pickled trees. That is silenced here,
message by message.
"""

from __future__ import annotations

import logging
import re
import warnings

import torch
import torch.distributed

_ADVICE = (
    "Please install the latest tensornvme",
    "Please install apex from source",
    "`broadcast_buffers` is deprecated",
    "`isinstance(treespec, LeafSpec)` is deprecated",
)


def apply() -> None:
    """Import ColossalAI and apply the cures; again is harmless. Call before anything else imports ColossalAI."""
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=re.escape(message))
    logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
        lambda record: "kernels-community" not in record.getMessage()
    )
    import colossalai  # noqa: F401 - everything that it imports on its way, under the filters above
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    CpuAccelerator.get_rng_state = lambda self, device=None: torch.get_rng_state()
    CpuAccelerator.set_rng_state = lambda self, new_state, device=None: torch.set_rng_state(new_state)
    CpuAccelerator.manual_seed = lambda self, seed: torch.manual_seed(seed)
    if not hasattr(torch.distributed, "is_hccl_available"):
        torch.distributed.is_hccl_available = lambda: False
