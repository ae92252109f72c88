"""The algorithms, one small file each. A new one is a file here, a line in `ALGORITHMS` and its name in
`learner.settings`; or a function of another package, named by an entry point of the group `quartet.algorithms`.

An algorithm only says which parts it is made of (`quartet_trainer.losses` has them) and what its own defaults are; a
setting the user wrote always wins over a default.
"""

from importlib.metadata import entry_points

from quartet_trainer.algorithms.base import Algorithm, AlgorithmFactory, Estimate, Scored
from quartet_trainer.algorithms.cispo import cispo
from quartet_trainer.algorithms.dapo import dapo
from quartet_trainer.algorithms.dr_grpo import dr_grpo
from quartet_trainer.algorithms.grpo import grpo
from quartet_trainer.algorithms.gspo import gspo
from quartet_trainer.algorithms.ppo import ppo
from quartet_trainer.algorithms.reinforce_pp import reinforce_pp
from quartet_trainer.algorithms.reinforce_pp_baseline import reinforce_pp_baseline
from quartet_trainer.algorithms.rloo import rloo
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner_settings import ALGORITHM_ENTRY_POINTS, LearnerSettings

ALGORITHMS: dict[str, AlgorithmFactory] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gspo": gspo,
    "cispo": cispo,
    "ppo": ppo,
}


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
