"""The processes that the service works with: made from the configuration, started and closed together."""

import asyncio
from dataclasses import dataclass

from quartet_reward.config import RewardSection
from quartet_reward.fair_sandbox import FairSandbox
from quartet_reward.math_equality import MathEquality
from quartet_reward.reward_model.batching import RewardModel
from quartet_reward.reward_model.process import model_pool
from quartet_reward.sandbox.chosen import ChosenSandbox
from quartet_reward.verifiers.base import Tools
from quartet_reward.verifiers.function import RewardFunction
from quartet_reward.worker_pool import Limits, WorkerPool


@dataclass(frozen=True)
class Resources:
    """Worker processes for mathematics, the sandbox (it starts when it is used), the reward model if there is one."""

    mathematics: WorkerPool
    tools: Tools
    functions: list[RewardFunction]

    @classmethod
    def of(cls, section: RewardSection, functions: list[RewardFunction]) -> "Resources":
        """Return what the configuration names; nothing runs yet."""
        limits = Limits(
            section.deadline_seconds, section.worker_memory_bytes, section.recycle_after, section.queue_seconds
        )
        mathematics = WorkerPool(section.workers, limits)
        model = None
        if section.reward_model.path is not None:
            model = RewardModel(model_pool(section.reward_model, section.queue_seconds), section.reward_model)
        sandbox = FairSandbox(ChosenSandbox(section.sandbox), section.sandbox.slots, section.queue_seconds)
        return cls(mathematics, Tools(MathEquality(mathematics, section.cache_bytes), sandbox, model), functions)

    def serve(self, verifier: str) -> bool:
        """Tell whether a verifier can work with what there is."""
        return verifier != "reward_model" or self.tools.reward_model is not None

    async def start(self) -> None:
        """Begin to start the processes; work may come at once and waits for them."""
        self.mathematics.start()
        for function in self.functions:
            function.pool.start()
        if self.tools.reward_model is not None:
            self.tools.reward_model.start()

    async def close(self) -> None:
        """Kill them; work that waits or runs fails with SHUT_DOWN. May be called again."""
        closing = [self.mathematics.close(), *(function.pool.close() for function in self.functions)]
        if self.tools.reward_model is not None:
            closing.append(self.tools.reward_model.close())
        if self.tools.sandbox is not None:
            closing.append(self.tools.sandbox.close())
        await asyncio.gather(*closing)
