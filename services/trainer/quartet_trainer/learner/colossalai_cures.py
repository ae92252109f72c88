"""What ColossalAI 0.5.0 needs on a CPU with the torch of our requirements. Defects of upstream, cured here alone.

1. `CpuAccelerator.get_rng_state`, `set_rng_state` and `manual_seed` pass on a device, or refuse to work, where the
   CPU's generator is meant: sharded layers seed their parameters through them.
2. `torch.distributed.is_hccl_available` was removed from torch; the pipeline's point-to-point code still asks for it.

Neither touches a machine with CUDA: there ColossalAI takes its CudaAccelerator, and NCCL answers the second question
before it is asked. Remove a cure when the pinned ColossalAI no longer needs it.
"""

from __future__ import annotations

import torch
import torch.distributed


def apply() -> None:
    """Apply the cures; again is harmless. Call before `colossalai.launch`."""
    from colossalai.accelerator.cpu_accelerator import CpuAccelerator

    CpuAccelerator.get_rng_state = lambda self, device=None: torch.get_rng_state()
    CpuAccelerator.set_rng_state = lambda self, new_state, device=None: torch.set_rng_state(new_state)
    CpuAccelerator.manual_seed = lambda self, seed: torch.manual_seed(seed)
    if not hasattr(torch.distributed, "is_hccl_available"):
        torch.distributed.is_hccl_available = lambda: False
