"""What keys of TRL and verl are called here, for whoever writes the name they are used to."""

import difflib
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class OtherName(NamedTuple):
    """A key of another project.

    Attributes:
        name: as it is called there; verl's with its path.
        default: there, as text; of verl's keys empty.
        key: what does the same here, e.g. "run.group_size"; empty: nothing does.
        note: how it differs, or why it is not here.
    """

    project: str
    name: str
    default: str
    key: str
    note: str

    def sentence(self) -> str:
        """Return "TRL's num_generations is run.group_size here"."""
        here = f"is {self.key} here" if self.key else "is not here"
        return f"{self.project}'s {self.name} {here}{f': {self.note}' if self.note else ''}"


@cache
def other_names() -> tuple[OtherName, ...]:
    """Return the arguments of TRL's GRPOTrainer and GRPOConfig and verl's most used keys, from other_names.toml."""
    projects = tomllib.loads(files("quartet_common").joinpath("other_names.toml").read_text(encoding="utf-8"))
    return tuple(
        OtherName(project, name, *row)
        for project, tables in projects.items()
        for table in tables.values()
        for name, row in table.items()
    )


def meant(parts: Sequence[str]) -> str:
    """Return the end of a sentence about the unknown key `parts`: what it is called here; empty if it is not theirs.

    The last part is enough, whatever section it stands in.
    """
    path = ".".join(parts)
    same = [each for each in other_names() if f".{path}".endswith(f".{each.name}")]
    return _ending(same or [each for each in other_names() if each.name.rpartition(".")[2] == parts[-1]])


def nearly_meant(name: str) -> str:
    """Return what `meant` does for a misspelt name."""
    long = {each.name: each for each in other_names() if len(each.name) > 6}  # short ones resemble anything
    return _ending([long[close] for close in difflib.get_close_matches(name, long, n=1, cutoff=0.85)])


def _ending(found: Sequence[OtherName]) -> str:
    return f": {found[0].sentence()}" if found else ""
