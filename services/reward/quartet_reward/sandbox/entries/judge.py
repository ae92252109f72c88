"""The tests' side of judged execution: the only entry that has the report pipe."""

from quartet_reward.code.judge import main

__all__ = ["main"]
