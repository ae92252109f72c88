"""What the server of forks imports before the first fork; see `processes`."""

from quartet_trainer.learner import colossalai_patches

colossalai_patches.apply()

import pytest  # noqa: E402, F401
import safetensors.torch  # noqa: E402, F401
import torch  # noqa: E402

import quartet_trainer.app  # noqa: E402, F401
import quartet_trainer.learner.learner  # noqa: E402, F401
import quartet_trainer.learner.plugins.fsdp  # noqa: E402, F401
import quartet_trainer.learner.plugins.gemini  # noqa: E402, F401
import quartet_trainer.learner.plugins.hybrid  # noqa: E402, F401
import quartet_trainer.learner.plugins.zero  # noqa: E402, F401
import quartet_trainer.training_run  # noqa: E402, F401

torch.set_num_threads(1)
