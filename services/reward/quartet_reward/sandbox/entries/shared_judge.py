"""The tests' side of judged execution, for many programs one after the other."""

from quartet_reward.code.shared_judge import main

__all__ = ["main"]
