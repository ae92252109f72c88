"""The learner: the model, its optimizer and its algorithm, spread over the ranks of one job.

This module, `base` and `checks` may be imported without torch. The keys of the run
file are in `quartet_trainer.learner_settings` and `plugin_settings`, which import none of this.
"""

from pathlib import Path

from quartet_trainer.errors import LearnerError
from quartet_trainer.learner.base import Learner, RunLike
from quartet_trainer.learner_settings import LearnerSettings


def create_learner(settings: LearnerSettings, model_path: Path, run: RunLike) -> Learner:
    """Load the model and wrap it with the plugin of `settings`. All ranks call.

    `quartet_trainer.learner.distributed.initialize` is called if the process has not done so.

    Args:
        settings: the trainer's section.
        model_path: a Hugging Face folder.
        run: `max_steps` and `sampling.max_new_tokens`.

    Raises:
        quartet_trainer.learner.checks.ModelFolderError: the folder cannot be used; the text says why.
        LearnerError: settings that this machine or this model cannot serve.
    """
    from quartet_trainer.learner import colossalai_patches

    colossalai_patches.apply()  # before ColossalAI's plugins are imported
    from quartet_trainer.learner.learner import BoosterLearner

    return BoosterLearner(settings, model_path, run)


__all__ = ["Learner", "LearnerError", "LearnerSettings", "create_learner"]
