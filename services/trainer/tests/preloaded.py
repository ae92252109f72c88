"""What the server of forks imports before the first fork; see `processes`."""

from quartet_trainer.learner import colossalai_patches

colossalai_patches.apply()

import pytest  # noqa: E402, F401
import safetensors.torch  # noqa: E402, F401
import torch  # noqa: E402

import quartet_trainer.app  # noqa: E402, F401

torch.set_num_threads(1)
