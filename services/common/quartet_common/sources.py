"""Where rows come from: the keys that sources of prompts and of supervised rows share."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from quartet_common.sections import Section


class RowSource(Section):
    """A file or a function by `path`, or a dataset of the hub by `dataset`."""

    owners: ClassVar[dict[str, tuple[str, ...]]] = {"path": (), "dataset": ("name", "split", "revision")}
    """The kinds of sources, of which exactly one is given, with the keys that belong to each."""
    named: ClassVar[str] = ""
    """How a source is given a name, if it can be."""

    path: Path | None = Field(
        None,
        description='JSONL or Parquet file, or a function that returns rows: "data.py:train", "package.module:train".',
    )
    dataset: str = Field("", description="Id of a dataset of the Hugging Face hub, instead of a path.")
    name: str = Field("", description="Configuration of the dataset. Default: its only one.")
    split: str = Field("", description='Split of the dataset, also a part of it, "train[:500]". Default: train.')
    revision: str = Field("", description="Branch, tag or commit of the dataset. Default: its main branch.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [kind for kind in self.owners if getattr(self, kind)]
        if len(given) != 1:
            *some, last = self.owners
            raise ValueError(f"exactly one of {', '.join(some)} and {last} is allowed")
        for owner, keys in self.owners.items():
            for key in keys:
                if given != [owner] and getattr(self, key):
                    what = "a dataset of the hub" if owner == "dataset" else f"an {owner}"
                    named = f"; {self.named}" if key == "name" and self.named else ""
                    raise ValueError(f"{key} belongs to {what}, and {given[0]} is given{named}")
        return self

    @property
    def title(self) -> str:
        """Its name in errors."""
        return str(self.path) if self.path is not None else f"{self.dataset} ({self.split or 'train'})"

    @property
    def is_jsonl(self) -> bool:
        """Whether it is a file that is read as JSONL."""
        return self.path is not None and ":" not in str(self.path) and self.path.suffix != ".parquet"


def data_sources(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the sources of an unchecked section [data], each with its key."""
    train, sets = data.get("train"), data.get("evaluation")
    if isinstance(train, list):
        yield from ((f"data.train[{n}]", one) for n, one in enumerate(train))
    elif train:
        yield "data.train", train
    if isinstance(sets, Mapping):
        yield from ((f"data.evaluation.{name}", one) for name, one in sets.items())


def task_sources(data: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield those that are tasks of an environment."""
    for key, source in data_sources(data):
        if isinstance(source, Mapping) and source.get("environment"):
            yield key, source


def as_table(value: Any) -> Any:
    """Return a source that is given by its path alone as its table."""
    return {"path": value} if isinstance(value, (str, Path)) else value
