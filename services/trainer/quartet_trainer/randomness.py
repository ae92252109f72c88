"""The state of this process's random generators, as a checkpoint holds it.

Training itself draws nothing: there is no dropout, and batches come from the broker. Callbacks and plug-ins may.
"""

import base64
import random
from array import array
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and torch's global generators, as JSON can hold it."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, _text(array("Q", words).tobytes()), gauss],
        "numpy": [str(name), _text(np.asarray(keys, np.uint32).tobytes()), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_text(state.numpy().tobytes()) for state in torch.cuda.get_rng_state_all()],
    }


def restore_random_state(saved: dict[str, Any]) -> None:
    """Go back to what `random_state` returned. CUDA's is restored for as many devices as there are now."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(array("Q", _bytes(words))), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.frombuffer(_bytes(keys), np.uint32), *rest))
    torch.set_rng_state(_tensor(saved["torch"]))
    for device, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_tensor(state), device)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_bytes(text)), dtype=torch.uint8)
