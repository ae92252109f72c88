"""Code of others that is called during a training: found by entry points, named in the run file.

`Starter` is what an entry point of the group `quartet.callbacks` gives; it makes a `Callback`, whose methods the
training calls. This package imports no torch, so that a run file can be checked without it.
"""

from quartet_trainer.callbacks.base import (
    BatchEvent,
    Callback,
    EvaluationEvent,
    Parameters,
    Starter,
    TrainingFacts,
    UpdateEvent,
)
from quartet_trainer.callbacks.calling import Callbacks
from quartet_trainer.callbacks.registry import CallbackSection, check_callbacks, load_callbacks

__all__ = [
    "BatchEvent",
    "Callback",
    "CallbackSection",
    "Callbacks",
    "EvaluationEvent",
    "Parameters",
    "Starter",
    "TrainingFacts",
    "UpdateEvent",
    "check_callbacks",
    "load_callbacks",
]
