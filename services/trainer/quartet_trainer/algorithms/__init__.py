"""Algorithms: each a class of `builtin`, or of another package, named by an entry point of `quartet.algorithms`.

An algorithm combines functions of `advantages` and `losses`. This package imports torch only where it computes.
"""

from importlib.metadata import entry_points
from typing import Annotated, Any, Union

from pydantic import PlainValidator, SerializeAsAny, ValidationError, WithJsonSchema
from pydantic_core import InitErrorDetails

from quartet_trainer.algorithms.base import Algorithm, ClippedRatio, CriticSection, Estimate, GroupNormalized, Scored
from quartet_trainer.algorithms.builtin import ALGORITHMS

ENTRY_POINTS = "quartet.algorithms"
"""Entry point group for algorithms of other packages, see docs/extend.md."""
DEFAULT = next(iter(ALGORITHMS))


def algorithm_class(name: str) -> type[Algorithm]:
    """Return the class of an algorithm, which is also the model of its keys.

    Raises ValueError if there is none, if several packages bring it, or if that of a package is no algorithm.
    """
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    points = entry_points(group=ENTRY_POINTS)
    found = [point for point in points if point.name == name]
    if not found:
        raise ValueError(f"there is no such algorithm here; allowed: {str((*ALGORITHMS, *sorted(points.names)))[1:-1]}")
    if len(found) > 1:
        places = ", ".join(point.value for point in found)
        raise ValueError(f"several packages bring it ({places}); uninstall all but one")
    where = f"entry point {found[0].value}"
    try:
        kind = found[0].load()
    except Exception as error:  # any module may be named here
        raise ValueError(f"{where}: cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Algorithm)):
        raise ValueError(f"{where}: no algorithm: it must be a subclass of quartet_trainer.algorithms.Algorithm")
    base, loss = (Algorithm.advantages, Algorithm.completion_advantages), Algorithm.policy_loss
    if kind.policy_loss is loss or (kind.advantages, kind.completion_advantages) == base:
        raise ValueError(f"{where}: no algorithm: it needs policy_loss, and completion_advantages or advantages")
    if (own := kind.model_fields["name"].default) != name:
        raise ValueError(f"{where}: its algorithm's name is '{own}', its entry point's is '{name}'; give both one name")
    return kind


def read_algorithm(value: Any) -> Algorithm:
    """Return the algorithm of a table of the run file, or of a name alone. Raises ValueError, also pydantic's."""
    if isinstance(value, Algorithm):
        return value
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict):
        raise ValueError("allowed: a name, or a table with a name and keys of that algorithm")
    table = {"name": DEFAULT, **table}
    try:
        kind = algorithm_class(str(table["name"]))
    except ValueError as error:
        raise ValueError(f"{'' if isinstance(value, str) else 'name: '}{error}") from error
    try:
        return kind.model_validate(table)
    except ValidationError as error:
        raise ValidationError.from_exception_data(
            error.title, [_with_owner(kind, problem) for problem in error.errors(include_url=False)]
        ) from error


def _with_owner(kind: type[Algorithm], problem: Any) -> InitErrorDetails:
    """Return a problem of a table again; an unknown key that other algorithms have is said to be theirs."""
    what, loc, ctx = problem["type"], problem["loc"], problem.get("ctx", {})
    owners = [name for name, other in ALGORITHMS.items() if loc in {(key,) for key in other.model_fields}]
    if what == "extra_forbidden" and owners:
        own = ", ".join(sorted(kind.model_fields.keys() - {"name"}))
        name = kind.model_fields["name"].default
        error = ValueError(f"a key of {' and '.join(owners)}; allowed with {name}: {own}")
        what, ctx = "value_error", {"error": error}
    return InitErrorDetails(type=what, loc=loc, input=problem["input"], ctx=ctx)


_OF_A_PACKAGE: Any = {"type": "object", "required": ["name"], "properties": {"name": {"not": {"enum": [*ALGORITHMS]}}}}
_WRITTEN: Any = Union[(str, *ALGORITHMS.values(), Annotated[dict, WithJsonSchema(_OF_A_PACKAGE)])]  # noqa: UP007
AnyAlgorithm = Annotated[SerializeAsAny[Algorithm], PlainValidator(read_algorithm, json_schema_input_type=_WRITTEN)]
"""An algorithm, as its table or by its name alone."""


__all__ = ["ALGORITHMS", "Algorithm", "ClippedRatio", "CriticSection", "Estimate", "GroupNormalized", "Scored"]
