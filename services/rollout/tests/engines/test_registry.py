"""Engines by name: options that are refused, folders that are not there; and the spans of versions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quartet_rollout.engines import EngineError, create_engine
from quartet_rollout.engines.base import version_spans


@pytest.mark.parametrize("name", ["vllm", "transformers"])
async def test_a_missing_model_folder_is_named(name: str, tmp_path: Path) -> None:
    engine = create_engine(name, str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match="nowhere' does not exist"):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sglang", {}, "engine 'sglang' does not exist; allowed: transformers, vllm"),
        ("vllm", {"max_num_seqs": 0}, "max_num_seqs"),
        ("vllm", {"max_num_batched_token": 1}, "no such engine argument; did you mean max_num_batched_tokens?"),
        ("vllm", {"logprobs_mode": "raw_logprobs"}, "logprobs_mode: it is set by the rollout"),
        ("transformers", {"kv_cache": 1}, "kv_cache"),
    ],
)
def test_unknown_engines_and_options_are_named(name: str, options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        create_engine(name, "model", options)


@pytest.mark.parametrize(("name", "old"), [("vllm", {"form": "async"}), ("transformers", {"place": "thread"})])
def test_keys_that_say_where_an_engine_computes_are_passed_over(
    name: str, old: dict, caplog: pytest.LogCaptureFixture
) -> None:
    create_engine(name, "model", old)
    (key,) = old
    assert [record.getMessage() for record in caplog.records] == [
        f"{key}: leave the key out; both engines compute in processes of their own now"
    ]


def test_spans_join_equal_neighbors_and_leave_out_empty_ones() -> None:
    assert version_spans([(0, 0)], 5) == ((0, 0, 5),)
    assert version_spans([(0, 0), (1, 3), (2, 3)], 5) == ((0, 0, 3), (2, 3, 5))
    assert version_spans([(0, 0), (-1, 2), (0, 2)], 4) == ((0, 0, 4),)
    assert version_spans([(0, 0), (1, 4)], 4) == ((0, 0, 4),)
    assert version_spans([(0, 0)], 0) == ()
