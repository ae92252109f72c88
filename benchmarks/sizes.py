"""Random models like the demo's, by size: `sizes.py SIZE FOLDER`, in the rollout's environment."""

import sys
from pathlib import Path
from typing import Any

from measuring import ROOT

SIZES: dict[str, dict[str, Any]] = {
    "0.3 M": {},
    "30 M": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8},
    "125 M": {"hidden_size": 1024, "intermediate_size": 4352, "num_hidden_layers": 8, "num_attention_heads": 16},
    "0.5 B": {  # Qwen2.5-0.5B's, for a GPU
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
    },
}
"""What differs from the config.json of the tests' model."""


def write(size: str, folder: Path, seed: int = 0) -> None:
    """Write a random model with a tokenizer of single characters."""
    sys.path.append(str(ROOT / "services" / "rollout" / "tests" / "engines"))
    from models import write_model

    write_model(folder, tied=True, seed=seed, **SIZES[size])


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]))
