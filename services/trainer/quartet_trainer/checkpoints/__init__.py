"""Folders of checkpoints: written whole or not at all, found again, and thinned out. Imports no torch.

| module | holds |
|---|---|
| `atomic` | `atomic_folder`: write aside, fsync, rename |
| `catalog` | `checkpoint_folder`, `find_checkpoints`, `prune` |
| `best` | `best.json`: which one is best by a metric; `Patience`: when to stop early |
| `lock` | `FolderLock`: one trainer at a time |

What is in a checkpoint is the learner's business (`quartet_trainer.learner.storage`).
"""

from quartet_trainer.checkpoints.atomic import atomic_folder
from quartet_trainer.checkpoints.catalog import CheckpointFolder, checkpoint_folder, find_checkpoints, prune

__all__ = ["CheckpointFolder", "atomic_folder", "checkpoint_folder", "find_checkpoints", "prune"]
