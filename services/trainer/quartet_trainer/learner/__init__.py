"""The learner: the model, its optimizer and its algorithm, spread over the ranks of one job.

This module and `checks` may be imported without torch. The keys of the run file are in
`quartet_trainer.learner_settings`, which imports none of this.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quartet_common.config import RunSection
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner_settings import LearnerSettings

if TYPE_CHECKING:
    from quartet_trainer.learner.learner import Learner


def create_learner(settings: LearnerSettings, model_path: Path, run: RunSection) -> Learner:
    """Load the model and wrap it with the plugin of `settings`. All ranks call.

    Calls `quartet_trainer.learner.distributed.initialize`.

    Args:
        settings: the trainer's section.
        model_path: a Hugging Face folder.
        run: the length of the schedule and of a completion, and what is recorded for each token.

    Raises:
        quartet_trainer.learner.checks.ModelFolderError: the folder cannot be used; the text says why.
        LearnerError: this machine or this model does not support the settings.
    """
    from quartet_trainer.learner import colossalai_patches

    colossalai_patches.apply()  # before ColossalAI's plugins are imported
    from quartet_trainer.learner.learner import Learner

    return Learner(settings, model_path, run)


__all__ = ["LearnerError", "LearnerSettings", "create_learner"]
