"""The reward service scores completions. Only the reward model's worker process imports torch.

From the call down to the arithmetic:

- `app`: assembles, starts and drains the parts. `preflight`: the checks of --dry-run.
- `servicer`: the RPCs.
- `queue`: the admission limit; runs take turns at workers and at sandbox slots.
- `scoring`: scores an item by its verifiers.
- `verifiers/`: the verifiers. `base` is their interface, `registry` finds them, users' own too.
- `answer_extraction`: thoughts, tags, boxes and trailing special tokens of a completion.
- `math/`: equality of answers. `code/`: runs programs against their tests, in the `sandbox/`.
- `workers/`: killable processes for mathematics, reward functions and the learned `reward_model`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Score:
    """What a reward function may return instead of a number."""

    reward: float
    """Before the weight. Finite."""
    correct: bool | None = None
    """Whether the answer is right; None if the function does not judge answers."""
    answer: str = ""
    """The answer as read from the completion."""
    reason: str = ""
