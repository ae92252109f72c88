"""The program's side of judged execution."""

from quartet_reward.code.candidate import main

__all__ = ["main"]
