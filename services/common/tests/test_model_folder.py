"""A model folder whose weights are not all there is refused with the file that is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from quartet_common.model_folder import fixed_rope_length, read_model_folder
from quartet_common.run_file import ConfigError

INDEX = "model.safetensors.index.json"


def tensors(size: int) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(size)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"vocab_size": 32}')
    (tmp_path / "model.safetensors").write_bytes(tensors(8))
    return tmp_path


def test_a_whole_one_gives_its_configuration(folder):
    assert read_model_folder(folder) == {"vocab_size": 32}
    (folder / "model.safetensors").rename(folder / "shard.safetensors")
    (folder / INDEX).write_text('{"weight_map": {"a": "shard.safetensors"}}')
    assert read_model_folder(folder) == {"vocab_size": 32}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", None, "model.path: '{}' has no config.json; a Hugging Face model folder is needed"),
        ("config.json", b"{", "model.path: '{}/config.json' is not JSON"),
        ("model.safetensors", None, "model.path: '{}' has no model.safetensors; weights are read from safetensors"),
        ("model.safetensors", b"version https://git-lfs", "model.safetensors' is no safetensors file; is it a pointer"),
        ("model.safetensors", tensors(7), "model.safetensors' has 76 bytes of 77; copy it again"),
        (INDEX, b'{"weight_map": {"a": "one.safetensors"}}', "model.path: '{}' has no one.safetensors"),
    ],
)
def test_faults_of_a_model_folder_are_named(folder, name, content, said):
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_model_folder(folder)
    assert said.format(folder) in str(error.value)


def test_a_folder_that_is_not_there_is_named_by_its_key(tmp_path):
    with pytest.raises(ConfigError, match="trainer.algorithm.critic.model: there is no folder '.*gone'"):
        read_model_folder(tmp_path / "gone", "trainer.algorithm.critic.model")
    with pytest.raises(ConfigError, match="model.path is missing"):
        read_model_folder(None)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
OLD = {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
INSIDE = {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, **INSIDE}}, None),
        ({"rope_scaling": LONGROPE, **INSIDE}, 4096),
        ({"rope_scaling": {**OLD, **INSIDE}}, 4096),
        ({"rope_scaling": {**LONGROPE, "short_factor": [2.0]}, **INSIDE}, None),
        ({"rope_scaling": DYNAMIC}, 131072),
        ({"rope_parameters": {"full_attention": {**LONGROPE, **INSIDE}, "sliding_attention": DYNAMIC}}, 4096),
        ({"text_config": {"rope_scaling": LONGROPE, **INSIDE, "max_position_embeddings": 131072}}, 4096),
    ],
)
def test_the_length_up_to_which_frequencies_are_fixed(config: dict[str, Any], length: int | None) -> None:
    assert fixed_rope_length({"max_position_embeddings": 131072, **config}) == length
