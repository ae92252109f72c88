"""Engines by name: options that are refused."""

from __future__ import annotations

import re

import pytest

from quartet_rollout.engines import create_engine


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sglang", {}, "engine 'sglang' does not exist; allowed: transformers, vllm"),
        ("vllm", {"max_num_batched_token": 1}, "no such engine argument; did you mean max_num_batched_tokens?"),
        ("vllm", {"logprobs_mode": "raw_logprobs"}, "logprobs_mode: it is set by the rollout"),
        ("transformers", {"kv_cache": 1}, "kv_cache"),
    ],
)
def test_unknown_engines_and_options_are_named(name: str, options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        create_engine(name, "model", options)
