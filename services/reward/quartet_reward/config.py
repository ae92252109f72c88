"""[reward]: the reward service's section of the run file."""

from pydantic import Field

from quartet_common.config import FunctionPath, Section
from quartet_reward.reward_model.config import RewardModelSection
from quartet_reward.sandbox.settings import SandboxSection
from quartet_reward.stream import MOST_ITEMS


class RewardSection(Section):
    """How many worker processes compare mathematics, what each may use, and how much may wait for them."""

    workers: int = Field(1, ge=1, le=1024, description="Worker processes for mathematics that is not plain numbers.")
    worker_memory_bytes: int = Field(
        1 << 30, ge=256 << 20, description="Most address space of a worker, in bytes (RLIMIT_AS)."
    )
    deadline_seconds: float = Field(5.0, ge=0.1, le=600, description="Seconds after which a comparison is killed.")
    recycle_after: int = Field(5000, ge=1, description="Comparisons after which a worker is replaced by a fresh one.")
    max_queue: int = Field(
        4096, ge=MOST_ITEMS, description="Most items under way that need a worker; beyond, calls are told to come back."
    )
    cache_bytes: int = Field(
        64 << 20, ge=0, description="Bytes of answers, references and verdicts of workers to remember; 0: none."
    )
    queue_seconds: float = Field(300.0, gt=0, description="Longest wait for a worker before an item fails (retryable).")
    functions: list[FunctionPath] = Field(
        [], description='Reward functions beside those of run.verifiers: "FILE.py:FUNCTION".'
    )
    function_workers: int = Field(1, ge=1, le=1024, description="Processes for each reward function.")
    function_seconds: float = Field(
        30.0, ge=0.1, le=3600, description="Seconds after which a call of a reward function is killed."
    )
    reward_model: RewardModelSection = Field(RewardModelSection(), description="The learned reward model.")
    sandbox: SandboxSection = Field(SandboxSection(), description="How programs are isolated.")
