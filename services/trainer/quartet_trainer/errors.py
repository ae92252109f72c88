"""Errors that end a training, for people."""


class TrainingError(Exception):
    """The training cannot go on; the text is one sentence for a person."""


class InvalidGroupsError(TrainingError):
    """So many groups in a row could not be trained that no other is to be expected."""


class SessionLost(TrainingError):
    """The broker refuses this session: another trainer has the run, or broker and checkpoints disagree."""


class LearnerError(Exception):
    """The learner cannot do what is asked; the text is one sentence for a person."""
