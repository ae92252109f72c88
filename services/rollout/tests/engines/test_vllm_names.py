"""The names of vLLM that the rollout uses, as the installed vLLM has them; or as an unpacked wheel, whose folder
QUARTET_VLLM names, e.g. before an upgrade."""

from __future__ import annotations

import os
import re
import shutil
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


def test_what_an_upgrade_breaks_is_named(tmp_path: Path) -> None:
    for name in {*vllm_names.NAMES, *vllm_names.FIELDS}:
        file = Path(*name.partition(":")[0].split(".")).with_suffix(".py")
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder() / file, tmp_path / file)
    engine = tmp_path / "v1" / "engine" / "async_llm.py"
    engine.write_text(engine.read_text().replace("def wake_up(self, tags", "def wake_up(self, labels"))
    (tmp_path / "inputs" / "engine.py").unlink()
    assert vllm_names.differences(tmp_path) == [
        "inputs.engine:tokens_input is gone",
        "v1.engine.async_llm:AsyncLLM.wake_up(self, labels) was (self, tags)",
    ]


def test_nothing_private_of_vllm_is_used_and_every_import_is_listed() -> None:
    listed = {name.partition(":")[2].partition(".")[0] for name in (*vllm_names.NAMES, *vllm_names.FIELDS)}
    listed |= {"AsyncEngineArgs", "VllmConfig", "current_platform", "EngineGenerateError", "ModelRegistry"}
    for file in ENGINE.glob("*.py"):
        source = file.read_text()
        for names in re.findall(r"^from vllm[\w.]* import \(?([\w,\s]+?)\)?$", source, re.MULTILINE):
            assert {name.strip() for name in names.split(",") if name.strip()} <= listed, file.name
        assert not re.search(r"(llm|runner|sampler|model|weight_transfer_engine|Factory)\._[a-z]", source), file.name
