"""Algorithms. A new one is a public function in `builtin`; or a function of another package, named by an entry point of
the group `quartet.algorithms`.

An algorithm only says which parts it is made of (`advantages` and `losses` have them) and what its own defaults are; a
setting the user wrote always wins over a default.
"""

from importlib.metadata import entry_points

from quartet_trainer.algorithms.base import Algorithm, Estimate, Scored
from quartet_trainer.algorithms.builtin import ALGORITHMS
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner_settings import ALGORITHM_ENTRY_POINTS, LearnerSettings


def create_algorithm(settings: LearnerSettings) -> Algorithm:
    """The algorithm that the settings name, with their values.

    Raises LearnerError for one of another package that cannot be made.
    """
    if settings.algorithm in ALGORITHMS:
        return ALGORITHMS[settings.algorithm](settings)
    (point,) = entry_points(group=ALGORITHM_ENTRY_POINTS, name=settings.algorithm)
    try:
        algorithm = point.load()(settings)
    except Exception as error:  # any function may be named here
        raise LearnerError(f"entry point {point.value}: cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        raise LearnerError(f"entry point {point.value}: no algorithm: it gave a {type(algorithm).__name__}")
    return algorithm


__all__ = ["ALGORITHMS", "Algorithm", "Estimate", "Scored", "create_algorithm"]
