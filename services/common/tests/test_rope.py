"""Up to which length a model's rotary frequencies are the same for every sequence, by its config.json."""

from typing import Any

import pytest

from quartet_common.model_folder import fixed_rope_length

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
OLD = {"type": "su", "short_factor": [1.0], "long_factor": [2.0]}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
INSIDE = {"original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"rope_scaling": None}, None),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, **INSIDE}}, None),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **INSIDE}}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, None),
        ({"rope_scaling": LONGROPE, **INSIDE}, 4096),
        ({"rope_scaling": {**OLD, **INSIDE}}, 4096),
        ({"rope_parameters": {**LONGROPE, **INSIDE, "rope_theta": 1e6}}, 4096),
        ({"rope_scaling": LONGROPE}, 131072),
        ({"rope_scaling": {**LONGROPE, "short_factor": [2.0]}, **INSIDE}, None),
        ({"rope_scaling": DYNAMIC}, 131072),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 131072),
        ({"rope_parameters": {"full_attention": {**LONGROPE, **INSIDE}, "sliding_attention": DYNAMIC}}, 4096),
        ({"text_config": {"rope_scaling": LONGROPE, **INSIDE, "max_position_embeddings": 131072}}, 4096),
    ],
)
def test_the_length_up_to_which_frequencies_are_fixed(config: dict[str, Any], length: int | None) -> None:
    assert fixed_rope_length({"max_position_embeddings": 131072, **config}) == length
