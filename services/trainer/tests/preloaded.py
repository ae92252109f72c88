"""What the server of forks imports before the first fork; see `processes`."""

from quartet_trainer.learner import colossalai_patches

colossalai_patches.apply()

import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

import numpy.ma  # noqa: E402, F401
import pytest  # noqa: E402, F401
import rich.logging  # noqa: E402, F401
import safetensors.torch  # noqa: E402, F401
import torch  # noqa: E402
from learner_helpers import make_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

import quartet_trainer.app  # noqa: E402, F401
import quartet_trainer.learner.learner  # noqa: E402, F401
import quartet_trainer.learner.plugins.fsdp  # noqa: E402, F401
import quartet_trainer.learner.plugins.gemini  # noqa: E402, F401
import quartet_trainer.learner.plugins.hybrid  # noqa: E402, F401
import quartet_trainer.learner.plugins.zero  # noqa: E402, F401
import quartet_trainer.training_run  # noqa: E402, F401
from quartet_server.host import freeze_gc_heap  # noqa: E402

torch.set_num_threads(1)
# For each kind of accelerator that is not there it would queue a call, with a formatted stack; sharding seeds often.
torch.manual_seed = torch.default_generator.manual_seed
logging.disable_progress_bar()
with tempfile.TemporaryDirectory() as folder:  # the first load compiles hundreds of patterns
    AutoModelForCausalLM.from_pretrained(make_model(Path(folder)))
freeze_gc_heap()  # ColossalAI collects with each group of ranks that it gives up
