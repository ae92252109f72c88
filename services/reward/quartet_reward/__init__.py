"""The reward service: what a completion is worth, and why. Knows nothing of training; imports no torch and no numpy.
(But for one process, the worker of the learned reward model, which is an extra.)

From the call down to the arithmetic:

- `preflight`: the checks before a start. `serving`: start and drain. `resources`: the processes that it works with.
- `telemetry`: metrics.
- `service`: the three RPCs; `stream`: one call of ScoreStream; `room`: how many items may be under way.
- `fair_queue`: runs have what is scarce in turns: workers, and sandbox slots (`fair_sandbox`).
- `scoring`: one item through its verifiers into one result. `specs`: reads which verifiers an item names, and how.
- `verifiers/`: one small file each behind the interface of `verifiers.base`; `registry` finds them, and users' own.
- `reading`: finds the answer in a completion (tags, boxes, trailing special tokens).
- `math_equality`: are two answers equal? `rationals` and `words` decide the plain cases in this process;
  the rest goes to `worker_pool`, whose killable processes (`worker_process`, `frames`) run `worker` → `math_compare`,
  guards around math-verify that know `notation`. `worker_side` is what every worker process begins with;
  `verdict_cache` remembers what they decided.
- `reward_model/`: a learned reward model in a process of its own.
- `code/`: programs judged by their tests, in the `sandbox/`.
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
