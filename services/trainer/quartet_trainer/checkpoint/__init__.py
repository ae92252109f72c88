"""Folders of checkpoints: written whole or not at all, found again, and thinned out. Imports no torch.

What is in a checkpoint is the learner's business (`quartet_trainer.learner.storage`).
"""

from quartet_trainer.checkpoint.folders import (
    CheckpointFolder,
    atomic_folder,
    checkpoint_folder,
    find_checkpoints,
    prune,
)

__all__ = ["CheckpointFolder", "atomic_folder", "checkpoint_folder", "find_checkpoints", "prune"]
