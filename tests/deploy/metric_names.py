"""The Prometheus metrics that the services declare, read from their code."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SERVICES = Path(__file__).resolve().parents[2] / "services"
KINDS = ("counter", "gauge", "histogram")


@dataclass(frozen=True)
class Metric:
    """A declaration."""

    name: str
    kind: str
    description: str
    labels: tuple[str, ...]
    service: str

    @property
    def series(self) -> set[str]:
        """Names under which it is stored."""
        if self.kind == "histogram":
            return {f"{self.name}_{part}" for part in ("bucket", "sum", "count")}
        return {self.name}


@cache
def literals(service: str) -> set[str]:
    """Return all string literals in the code of a service."""
    return {
        node.value
        for file in SERVICES.glob(f"{service}/quartet_*/**/*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@cache
def declared_metrics() -> dict[str, Metric]:
    """Return every metric by name; a declaration is a call of `counter`, `gauge` or `histogram` with literals."""
    found = {}
    for file in sorted(SERVICES.glob("*/quartet_*/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            kind = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if kind not in KINDS or not node.args or not isinstance(node.args[0], ast.Constant):
                continue
            name, description = (ast.literal_eval(argument) for argument in node.args[:2])
            labels = [keyword.value for keyword in node.keywords if keyword.arg == "labels"] or node.args[2:3]
            found[name] = Metric(
                name,
                kind,
                description,
                tuple(ast.literal_eval(labels[0])) if labels else (),
                file.relative_to(SERVICES).parts[0],
            )
    return found
