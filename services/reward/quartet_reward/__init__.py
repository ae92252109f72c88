"""The reward service: what a completion is worth, and why. Knows nothing of training; imports no torch and no numpy.
(But for one process, the worker of the learned reward model, which is an extra.)

From the call down to the arithmetic:

- `app`: the parts are made, started and drained here. `preflight`: what --dry-run checks.
- `servicer`: the RPCs.
- `queue`: how many items may be under way; runs take turns at workers and at sandbox slots.
- `scoring`: one item through its verifiers into one result.
- `verifiers/`: behind the interface of `verifiers.base`; `registry` finds them, and users' own.
- `answer_extraction`: tags, boxes and trailing special tokens of a completion.
- `math/`: are two answers equal? `code/`: programs judged by their tests, in the `sandbox/`.
- `workers/`: processes that can be killed, for mathematics, reward functions and the learned `reward_model`.
"""

from dataclasses import dataclass

__version__ = "0.1.0"


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function may return instead of a number."""

    reward: float
    """Before the weight. Finite."""
    correct: bool | None = None
    """Whether the answer is right; None: the function does not judge answers."""
    answer: str = ""
    """The answer as read from the completion."""
    reason: str = ""
    """Why, in words."""
