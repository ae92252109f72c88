"""The mutations: patches that break the product. Each starts with a description and the tests that must fail.

    The sign of an advantage is wrong.
    Tests: services/trainer/tests/algorithms/test_grpo.py

    diff --git …

A line `Hang: yes` means that the tests hang, so that reaching the time limit counts as caught.
"""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Mutation:
    """A patch and its header."""

    name: str  # SERVICE/NAME
    path: Path
    what: str
    tests: tuple[str, ...]
    hangs: bool
    files: tuple[str, ...]  # that it changes


def read_mutations(patterns: list[str]) -> list[Mutation]:
    """Return the mutations whose names match one of the patterns; all without patterns."""
    mutations = [read_mutation(path) for path in sorted(HERE.glob("*/*.patch"))]
    return [one for one in mutations if not patterns or any(fnmatch(one.name, pattern) for pattern in patterns)]


def read_mutation(path: Path) -> Mutation:
    text = path.read_text()
    lines = text.partition("\ndiff --git ")[0].splitlines()
    fields = dict(line.split(": ", 1) for line in lines if line.startswith(("Tests: ", "Hang: ")))
    what = " ".join(line for line in lines if line and not line.startswith(("Tests: ", "Hang: ")))
    files = tuple(line.removeprefix("+++ b/") for line in text.splitlines() if line.startswith("+++ b/"))
    name = path.relative_to(HERE).with_suffix("").as_posix()
    return Mutation(name, path, what, tuple(fields.get("Tests", "").split()), fields.get("Hang") == "yes", files)
