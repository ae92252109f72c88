"""From groups as messages to micro-batches, by index arithmetic on whole batches: nothing loops over tokens."""

from quartet_trainer.batch.collate import MicroBatch, collate
from quartet_trainer.batch.decode import ExperienceBatch, decode_group, decode_groups
from quartet_trainer.batch.planner import StepPlan, plan_step
from quartet_trainer.batch.tensors import ExperienceError

__all__ = [
    "ExperienceBatch",
    "ExperienceError",
    "MicroBatch",
    "StepPlan",
    "collate",
    "decode_group",
    "decode_groups",
    "plan_step",
]
