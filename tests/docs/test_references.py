"""The generated pages are up to date with models and protos."""

import copy
import json
import tomllib

import jsonschema
import pytest
import run_file
import write
from pages import ROOT

from quartet_common.refusals import other_names


@pytest.fixture(scope="session")
def made() -> dict[str, str]:
    return write.pages()


def test_made_pages_are_not_stale(made):
    wrong = write.stale(made)
    assert not wrong, f"{wrong} are not up to date: run .quartet/envs/dev/bin/python docs/tools/write.py"


def test_every_key_has_a_meaning():
    schemas = run_file.read_schemas()
    silent = [
        f"{places[0]}.{key}"
        for name, schema in schemas.items()
        for places, _, model in run_file.tables(name, schema)
        for key, field in model["properties"].items()
        if not run_file.meaning(field, schema.get("$defs", {}))
    ]
    assert not silent


def test_every_name_of_trl_and_verl_is_answered_with_keys_that_there_are_or_a_reason():
    names = [one for one in other_names() if one.project == "TRL"]
    listed = (ROOT / "tests" / "docs" / "grpo_config.txt").read_text().split()
    assert [one.name for one in names if one.default] == listed[listed.index("output_dir") :]
    known, _ = run_file.keys(run_file.read_schemas())
    assert not [one for one in other_names() if not one.note and not one.key]
    assert not {key for one in other_names() for key in one.key.split(", ") if key} - known


def test_the_schema_takes_the_demos_run_file_and_refuses_others(made):
    schema = json.loads(made["run-file.schema.json"])
    tree = tomllib.loads((ROOT / "examples" / "arithmetic" / "run.toml").read_text())
    jsonschema.validate(tree, schema)
    for section, key, value in (("run", "group_sise", 8), ("trainer", "schedule", "sine"), ("runs", "id", "a")):
        wrong = copy.deepcopy(tree)
        wrong.setdefault(section, {})[key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
