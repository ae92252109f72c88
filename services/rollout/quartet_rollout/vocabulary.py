"""A digest of a tokenizer's vocabulary, by which two models are seen to have the same tokens."""

from functools import lru_cache
from hashlib import sha256
from typing import Any


@lru_cache(maxsize=1)
def vocabulary_digest(tokenizer: Any) -> str:
    """Return the SHA-256 of `LogProbsRequest.vocabulary` of a `transformers` tokenizer."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return sha256("".join(f"{number} {token}\n" for number, token in tokens).encode()).hexdigest()
