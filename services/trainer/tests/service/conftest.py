"""The fixtures of the service's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_broker import FakeBroker
from receiver import receiver
from training import train

__all__ = ["receiver", "train"]


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    """A broker with the run 'test' and endless batches."""
    broker = FakeBroker()
    yield broker
    broker.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 128 tokens that any CPU trains in a moment."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    return folder
