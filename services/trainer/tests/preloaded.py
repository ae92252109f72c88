"""What the server of forks imports before the first fork; see `processes`."""

from quartet_trainer.learner import colossalai_patches

colossalai_patches.apply()

import pytest  # noqa: E402, F401
import safetensors.torch  # noqa: E402, F401
import torch  # noqa: E402

import quartet_trainer.learner.booster_learner  # noqa: E402
import quartet_trainer.learner.plugins.gemini  # noqa: E402
import quartet_trainer.learner.plugins.hybrid_parallel  # noqa: E402
import quartet_trainer.learner.plugins.low_level_zero  # noqa: E402
import quartet_trainer.learner.plugins.torch_fsdp  # noqa: E402
import quartet_trainer.life  # noqa: E402
import quartet_trainer.service  # noqa: E402, F401

torch.set_num_threads(1)
