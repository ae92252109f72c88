"""Errors that end a training. Their messages are shown to users."""


class TrainingError(Exception):
    """The training cannot continue."""


class InvalidGroupsError(TrainingError):
    """`trainer.max_invalid_groups` groups in a row were invalid."""


class SessionLost(TrainingError):
    """The broker refuses this session: another trainer has the run, or broker and checkpoints disagree."""


class LearnerError(Exception):
    """The learner cannot do what was requested."""
