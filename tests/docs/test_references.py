"""The pages that are made are as the models and the protos are now."""

import copy
import json
import tomllib

import jsonschema
import pytest
import run_file
import write
from pages import ROOT


@pytest.fixture(scope="session")
def made() -> dict[str, str]:
    return write.pages()


def test_made_pages_are_not_stale(made):
    wrong = write.stale(made)
    assert not wrong, f"{wrong} are not as models and protos are: run .quartet/envs/dev/bin/python docs/tools/write.py"


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


def test_the_schema_takes_the_demos_run_file_and_refuses_others(made):
    schema = json.loads(made["run-file.schema.json"])
    tree = tomllib.loads((ROOT / "examples" / "arithmetic" / "run.toml").read_text())
    jsonschema.validate(tree, schema)
    for section, key, value in (("run", "group_sise", 8), ("trainer", "schedule", "sine"), ("runs", "id", "a")):
        wrong = copy.deepcopy(tree)
        wrong.setdefault(section, {})[key] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
