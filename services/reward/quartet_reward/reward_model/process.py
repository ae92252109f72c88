"""How the reward model's process is started."""

import os

from quartet_reward.reward_model.config import RewardModelSection
from quartet_reward.worker_pool import Limits, WorkerPool
from quartet_reward.worker_process import WorkerProcess

# What torch and CUDA read of the environment, beside what every worker sees.
_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES")
# Batches in a process's life: a model leaks nothing that we know of, and loading it is dear.
_BATCHES = 1_000_000_000


def model_pool(section: RewardModelSection, queue_seconds: float) -> WorkerPool:
    """Return the pool of the one process that has the model. `queue_seconds`: longest wait for it, loading included."""
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    # It reads what is in its folder and nothing else.
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(section.threads)}
    arguments = [
        f"--path={section.path}",
        f"--device={section.device}",
        f"--dtype={section.dtype}",
        f"--threads={section.threads}",
        f"--max-tokens={section.max_tokens}",
        f"--batch-tokens={section.batch_tokens}",
        *(["--add-special-tokens"] if section.add_special_tokens else []),
    ]

    def start(memory_bytes: int) -> WorkerProcess:
        return WorkerProcess("quartet_reward.reward_model.worker", arguments, variables, section.start_seconds)

    limits = Limits(section.deadline_seconds, 0, _BATCHES, queue_seconds)
    return WorkerPool(1, limits, start, "reward_model")
