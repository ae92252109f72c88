"""The sources of a section [data] that is not yet checked."""

import pytest

from quartet_common.sources import data_sources, task_sources

TASKS = {"environment": "agent.py:play"}


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        ({}, []),
        ({"train": "rows.jsonl"}, []),
        ({"train": TASKS}, ["data.train"]),
        ({"train": ["rows.jsonl", TASKS]}, ["data.train[1]"]),
        ({"train": "rows.jsonl", "evaluation": {"held": TASKS, "rows": "held.jsonl"}}, ["data.evaluation.held"]),
        ({"train": 3, "evaluation": "held.jsonl"}, []),
    ],
)
def test_tasks_are_found_in_each_form_of_the_data(data: dict, keys: list[str]) -> None:
    assert list(task_sources(data)) == [(key, TASKS) for key in keys]


def test_every_source_has_its_key() -> None:
    data = {"train": ["a.jsonl", {"path": "b.jsonl"}], "evaluation": {"held": "c.jsonl"}}
    keys = ["data.train[0]", "data.train[1]", "data.evaluation.held"]
    assert list(data_sources(data)) == list(zip(keys, ["a.jsonl", {"path": "b.jsonl"}, "c.jsonl"], strict=True))
