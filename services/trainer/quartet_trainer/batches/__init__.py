"""From the wire to what a forward pass takes.

| module | holds |
|---|---|
| `experience` | `ExperienceBatch`: the groups of a step as flat tensors; `decode_groups`, `ExperienceError` |
| `plan` | which tokens are trained with which weight, and which completions on which rank in which micro-batch |
| `collate` | a micro-batch's padded token ids and the flat positions whose log-probs are wanted |

Everything here is done by index arithmetic on whole batches; no loop runs over completions or tokens.
"""

from quartet_trainer.batches.collate import MicroBatch, collate
from quartet_trainer.batches.experience import ExperienceBatch, ExperienceError, decode_groups
from quartet_trainer.batches.plan import StepPlan, plan_step

__all__ = ["ExperienceBatch", "ExperienceError", "MicroBatch", "StepPlan", "collate", "decode_groups", "plan_step"]
