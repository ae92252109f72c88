"""What the rollout says of its host and model before it starts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

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


def test_a_context_beyond_the_models_positions_is_refused_for_vllm_unless_it_is_told_otherwise(
    check, tmp_path, monkeypatch
):
    check("rollout.vllm.max_model_len=256")
    with pytest.raises(ConfigError, match="rollout.vllm.max_model_len is 257; allowed: at most the model's 256"):
        check("rollout.vllm.max_model_len=257")
    check("rollout.vllm.max_model_len=257", "rollout.vllm.hf_overrides={max_position_embeddings=512}")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": {"type": "linear", "factor": 2.0}}))
    check("rollout.vllm.max_model_len=257")
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    check("rollout.vllm.max_model_len=257")


def test_workers_that_cannot_share_the_heads_are_refused(check, tmp_path):
    check("rollout.vllm.tensor_parallel_size=3")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "num_attention_heads": 4}))
    check("rollout.vllm.tensor_parallel_size=2")
    check("rollout.vllm.tensor_parallel_size=3", "rollout.engine=transformers")
    told = "rollout.vllm.tensor_parallel_size: got 3; allowed: a divisor of the model's num_attention_heads, 4"
    with pytest.raises(ConfigError, match=told):
        check("rollout.vllm.tensor_parallel_size=3")


@pytest.mark.parametrize(
    ("key", "switch"),
    [
        ("vllm.max_num_seqs=4", 'engine = "vllm"'),
        ("transformers.max_num_seqs=4", 'engine = "transformers"'),
        ("http.max_tokens=4", "http.address"),
    ],
)
def test_keys_of_what_is_not_used_are_warned_of(check, caplog, key, switch):
    table, _, name = key.removesuffix("=4").partition(".")
    told = f"[rollout.{table}] {name}: without effect; set rollout.{switch}, or leave the section out"
    used = {"http": "rollout.http.address=127.0.0.1:7113"}.get(table, f"rollout.engine={table}")
    check(used, f"rollout.{key}")
    assert told not in caplog.messages
    check("rollout.engine=transformers" if table != "transformers" else "rollout.engine=vllm", f"rollout.{key}")
    assert told in caplog.messages


@pytest.mark.parametrize("address", ["0.0.0.0:7113", "[::]:7113"])
def test_an_endpoint_at_all_addresses_needs_its_url_for_agents(check, tmp_path, address):
    settings = f"rollout.http.address={address}", "security.insecure=true"
    with pytest.raises(ConfigError, match=r"rollout.http.url: got none, and agents cannot call .*:7113; set the URL"):
        check(*settings)
    check(*settings, "rollout.http.url=http://host:7113")
    (tmp_path / "keys").write_text("key")
    check(*settings, f"rollout.http.keys_file={tmp_path / 'keys'}")  # for applications
    with pytest.raises(ConfigError, match=r"rollout.http.url: got none"):
        check(*settings, f"rollout.http.keys_file={tmp_path / 'keys'}", "run.environment={name='a.py:b', served=true}")


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


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["run.sampling.stop_token_ids=[5, 8]"], "run.sampling.stop_token_ids: got 8; allowed: below 8,"),
        (
            ["run.evaluation_sampling.logit_bias={9 = 1}"],
            "run.evaluation_sampling.logit_bias: got 9; allowed: below 8,",
        ),
        (["run.sampling.min_tokens=17"], "run.sampling.min_tokens: got 17; allowed: at most max_new_tokens, 16"),
        (
            ["run.evaluation_sampling.max_new_tokens=8", "run.sampling.min_tokens=9"],
            "run.evaluation_sampling.min_tokens: got 9; allowed: at most max_new_tokens, 8",
        ),
        (["data.train=rows.jsonl"], "rows.jsonl, line 2: sampling.stop_token_ids: got 8; allowed: below 8,"),
    ],
)
def test_sampling_that_no_engine_can_honor_is_refused(check, tmp_path, monkeypatch, settings, told):
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "qwen2", "max_position_embeddings": 256, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = ({"prompt": "a", "sampling": {"stop_token_ids": [last]}} for last in (7, 8))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    check("run.sampling.max_new_tokens=16", "run.sampling.stop_token_ids=[7]", "run.sampling.min_tokens=16")
    with pytest.raises(ConfigError) as refused:
        check("run.sampling.max_new_tokens=16", *settings)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("token_ids", "told"),
    [
        ([1, 8], "rows.jsonl, line 2: prompt.token_ids: got 8; allowed: below 8, the model's vocab_size"),
        ([1] * 241, "rows.jsonl, line 2: prompt.input: got 241 tokens; allowed: at most 240: "),
    ],
)
def test_token_ids_that_the_model_cannot_read_are_refused(check, tmp_path, monkeypatch, token_ids, told):
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "qwen2", "max_position_embeddings": 256, "vocab_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    Tokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    rows = [json.dumps({"token_ids": ids}) + "\n" for ids in ([7] * 240, token_ids)]
    (tmp_path / "rows.jsonl").write_text(rows[0])
    settings = ("data.train=rows.jsonl", "run.sampling.max_new_tokens=16")
    check(*settings)
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    with pytest.raises(ConfigError) as refused:
        check(*settings)
    assert told in str(refused.value)
