"""From the wire to what a forward pass takes.

| module | holds |
|---|---|
| `experience` | `ExperienceBatch`: the groups of a step as flat tensors; `decode_groups`, `check_group`, their error |
| `plan` | which tokens are trained with which weight, and which completions on which rank in which micro-batch |
| `dealing` | the arithmetic of sharing out and cutting |
| `collate` | a micro-batch: its token ids, padded, and the places whose log-probs are wanted |
| `shared_prompts` | its other layout: one packed row, with each prompt once |

Everything here is done by index arithmetic on whole batches; no loop runs over tokens.
"""

from quartet_trainer.batches.collate import MicroBatch, collate
from quartet_trainer.batches.experience import ExperienceBatch, ExperienceError, check_group, decode_groups
from quartet_trainer.batches.plan import StepPlan, plan_step

__all__ = [
    "ExperienceBatch",
    "ExperienceError",
    "MicroBatch",
    "StepPlan",
    "check_group",
    "collate",
    "decode_groups",
    "plan_step",
]
