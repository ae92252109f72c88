"""Texts to token ids and back, exactly as they stand: no special token is added, none is left out."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quartet_common.text import encodable

LONG_BYTES = 1 << 16
"""A longer prompt is not read in the event loop's thread."""


class Texts:
    """A transformers tokenizer's, at the cost of the tokenizer itself.

    transformers prepares every single text for what is not wanted here (pairs, padding, truncation, tensors), at ten
    times the cost of a short one. So the tokenizer beneath is asked, where the class leaves all of the work to it.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Take a tokenizer whose settings nobody changes from now on."""
        self._tokenizer = tokenizer
        self._beneath = _beneath(tokenizer)
        if self._beneath is not None:
            self._beneath.no_truncation()
            self._beneath.no_padding()
            self._beneath.encode_special_tokens = tokenizer.split_special_tokens

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, int32."""
        if self._beneath is None:
            return np.asarray(self._tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        if len(text) <= LONG_BYTES:
            return np.asarray(self._beneath.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        # Only with a batch the tokenizer lets other threads run meanwhile: megabytes take it seconds.
        (encoded,) = self._beneath.encode_batch([text], add_special_tokens=False)
        return np.asarray(encoded.ids, dtype=np.int32)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        if self._beneath is None:
            return encodable(
                self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            )
        return self._beneath.decode(token_ids, skip_special_tokens=False)


def _beneath(tokenizer: Any) -> Any:
    """The `tokenizers.Tokenizer` that does all the work; None where the class, or one it inherits from, has a part in
    it."""
    try:
        from transformers import TokenizersBackend
    except ImportError:  # transformers 4
        return None
    methods = ("encode", "_encode_plus", "decode", "_decode")
    if not isinstance(tokenizer, TokenizersBackend):
        return None
    plain = all(getattr(type(tokenizer), name) is getattr(TokenizersBackend, name) for name in methods)
    return tokenizer.backend_tokenizer if plain else None
