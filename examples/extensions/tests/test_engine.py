"""`parrot` in the rollout: selected by the run file, an `Engine`, with pauses, aborts and policy versions."""

import asyncio
import json

import pytest

from quartet_common.config import ConfigError, load_config
from quartet_rollout.config import RolloutSection
from quartet_rollout.engines import Engine, PromptError, SamplingSettings, create_engine

PROMPT = [10, 11, 12, 13]


def configured(*more: str) -> RolloutSection:
    return load_config("rollout", RolloutSection, overrides=["rollout.engine=parrot", *more]).section


@pytest.fixture
async def parrot(tmp_path):
    from tokenizers import Tokenizer, models

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 32, "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | shape))
    Tokenizer(models.WordLevel({f"w{n}": n for n in range(32)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    section = configured("rollout.engine_parameters={seconds_per_token=0.001, max_model_len=16}")
    engine = create_engine(section.engine, str(tmp_path), section.engine_options)
    await engine.start()
    yield engine
    await engine.close()


async def test_it_is_an_engine_that_says_the_prompt_again(parrot):
    assert isinstance(parrot, Engine) and "weights.gloo" in parrot.capabilities()
    await parrot.set_version(3)
    said = [one async for one in parrot.generate("a", PROMPT, 2, SamplingSettings(max_new_tokens=8))]
    assert [one.index for one in said] == [0, 1]
    assert all(one.token_ids.tolist() == PROMPT and one.version_spans == ((3, 0, 4),) for one in said)
    assert all(one.finish_reason == "stop" and not one.log_probs.any() for one in said)
    (short,) = [one async for one in parrot.generate("b", PROMPT, 1, SamplingSettings(max_new_tokens=3))]
    assert (short.token_ids.tolist(), short.finish_reason) == (PROMPT[:3], "length")
    with pytest.raises(PromptError, match="token id 99"):
        await anext(parrot.generate("c", [99], 1, SamplingSettings()))


async def test_a_pause_stops_it_between_two_tokens_and_an_abort_ends_it(parrot):
    await parrot.pause("keep")
    under_way = asyncio.create_task(anext(parrot.generate("a", PROMPT, 1, SamplingSettings())))
    while not parrot.stats().running:
        await asyncio.sleep(0)
    assert not under_way.done()
    parrot.policy_version = 7
    await parrot.resume()
    assert (await under_way).version_spans == ((7, 0, 4),)
    await parrot.pause("keep")
    under_way = asyncio.create_task(anext(parrot.generate("b", PROMPT, 1, SamplingSettings())))
    while not parrot.stats().running:
        await asyncio.sleep(0)
    await parrot.abort("b")
    assert (await under_way).finish_reason == "abort"


def test_the_run_file_is_checked():
    assert configured("rollout.engine_parameters.threads=2").engine_options.threads == 2
    with pytest.raises(ConfigError, match="rollout.engine_parameters.seconds_per_token: got -1"):
        configured("rollout.engine_parameters.seconds_per_token=-1")
    with pytest.raises(ConfigError, match="there is no 'parot' here; allowed: parrot, transformers, vllm"):
        configured("rollout.engine=parot")
    with pytest.raises(ConfigError, match="transformers takes none"):
        configured("rollout.engine=transformers", "rollout.engine_parameters.threads=2")
