"""Algorithms: each a public function in `builtin`, or a function of another package, named by an entry point of the
group `quartet.algorithms`.

An algorithm only names its parts, from `advantages` and `losses`, and its defaults. Settings of the run file override
the defaults.
"""

from importlib.metadata import entry_points

from quartet_trainer.algorithms.base import Algorithm, Estimate, Scored
from quartet_trainer.algorithms.builtin import ALGORITHMS
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner_settings import ALGORITHM_ENTRY_POINTS, LearnerSettings


def create_algorithm(settings: LearnerSettings) -> Algorithm:
    """Create the algorithm that the settings name.

    Raises LearnerError if that of another package cannot be created, or several packages bring one of that name.
    """
    if settings.algorithm in ALGORITHMS:
        return ALGORITHMS[settings.algorithm](settings)
    point, *others = entry_points(group=ALGORITHM_ENTRY_POINTS, name=settings.algorithm)
    if others:
        places = ", ".join(each.value for each in (point, *others))
        raise LearnerError(
            f"algorithm '{settings.algorithm}': several packages bring it ({places}); uninstall all but one"
        )
    try:
        algorithm = point.load()(settings)
    except Exception as error:  # any function may be named here
        raise LearnerError(f"entry point {point.value}: cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(algorithm, Algorithm):
        raise LearnerError(f"entry point {point.value}: no algorithm: it gave a {type(algorithm).__name__}")
    return algorithm


__all__ = ["ALGORITHMS", "Algorithm", "Estimate", "Scored", "create_algorithm"]
