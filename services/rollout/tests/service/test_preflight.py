"""What the rollout says of its host and model before it starts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from quartet_common.config import ConfigError, load_config
from quartet_rollout.config import RolloutSection
from quartet_rollout.preflight import preflight


@pytest.fixture
def check(tmp_path: Path):
    """Check a model of 256 positions with these settings."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 256}))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}')
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return lambda *settings: preflight(
        load_config("rollout", RolloutSection, None, [f"model.path={tmp_path}", *settings])
    )


def test_a_context_beyond_the_models_positions_is_refused(check):
    check("rollout.engine=transformers", "rollout.transformers.max_model_len=256")
    with pytest.raises(
        ConfigError, match="rollout.transformers.max_model_len is 257; allowed: at most the model's 256"
    ):
        check("rollout.engine=transformers", "rollout.transformers.max_model_len=257")


@pytest.mark.parametrize("url", ["host:7113", "http://[::1:7113", "http://host:99999", "http://:7113"])
def test_an_url_of_the_endpoint_that_is_none_is_refused(check, url):
    with pytest.raises(ConfigError, match=r"rollout\.http\.url: got .*: got no address of HTTP; allowed: "):
        check(f'rollout.http.url="{url}"')


def test_little_shared_memory_is_a_warning_for_an_engine_with_processes(check, monkeypatch, caplog):
    usage = SimpleNamespace(total=64 << 20, used=0, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    check("rollout.engine=transformers")
    assert not caplog.messages
    check("rollout.engine=vllm")
    assert ["/dev/shm holds 0.06 GiB" in message for message in caplog.messages] == [True]
