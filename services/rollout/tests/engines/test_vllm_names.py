"""The names of vLLM that the rollout uses, as the installed vLLM has them; or as an unpacked wheel, whose folder
QUARTET_VLLM names, e.g. before an upgrade."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import vllm_names

import quartet_rollout

ENGINE = Path(quartet_rollout.__file__).parent / "engines" / "vllm_engine"


def folder() -> Path:
    found = find_spec("vllm")
    assert found is not None and found.submodule_search_locations
    return Path(os.environ.get("QUARTET_VLLM", found.submodule_search_locations[0]))


def test_every_name_is_there_with_its_parameters() -> None:
    assert vllm_names.differences(folder()) == []


def test_nothing_private_of_vllm_is_used_and_every_import_is_listed() -> None:
    listed = {name.partition(":")[2].partition(".")[0] for name in (*vllm_names.NAMES, *vllm_names.FIELDS)}
    listed |= {"AsyncEngineArgs", "VllmConfig", "current_platform", "EngineGenerateError", "ModelRegistry"}
    for file in ENGINE.glob("*.py"):
        source = file.read_text()
        for names in re.findall(r"^from vllm[\w.]* import \(?([\w,\s]+?)\)?$", source, re.MULTILINE):
            assert {name.strip() for name in names.split(",") if name.strip()} <= listed, file.name
        assert not re.search(r"(llm|runner|sampler|model|weight_transfer_engine|Factory)\._[a-z]", source), file.name
