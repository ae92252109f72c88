"""The program's side of judged execution."""

from quartet_reward.code.candidate_side import main

__all__ = ["main"]
