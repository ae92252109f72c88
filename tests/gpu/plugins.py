"""A training step with each plugin, as one rank: `plugins.py [--large] PLUGIN:PRECISION ...` prints a JSON object.

Runs in the trainer's environment, on the device that the learner chooses. Each plugin makes the same step with a tiny
model; loss and gradient norm are printed. With --large also two steps with a model of 0.5 billion parameters on a GPU,
with prompts computed once per group and once per completion: tokens/s, peak memory and model FLOPs utilization of the
second (6 FLOPs per parameter and token, arXiv:2204.02311 without attention's).
"""

import argparse
import gc
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "services" / "trainer" / "tests"))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from learner_helpers import Run, make_group, make_model  # noqa: E402

from quartet_trainer.learner import LearnerSettings, create_learner  # noqa: E402

# Qwen2.5-0.5B's.
LARGE: dict[str, Any] = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 4096, "initializer_range": 0.02,
}  # fmt: skip
GROUPS, COMPLETIONS, PROMPT_TOKENS, TOKENS = 4, 8, 512, 512
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"""Of dense bf16 products, by a part of the GPU's name, from NVIDIA's data sheets."""


def small_step(model: Path, plugin: str, precision: str) -> dict[str, float]:
    """Return the loss and gradient norm of the step."""
    rng = np.random.default_rng(0)
    groups = [make_group(rng, [4, 9, 6, 11], rewards=[0.0, 1.0, 2.0, 3.0], temperature=1.0) for _ in range(2)]
    settings = LearnerSettings(plugin=plugin, precision=precision, learning_rate=1e-3)
    found = create_learner(settings, model, Run()).train_step(groups)
    return {name: found[name] for name in ("loss", "grad_norm")}


def large_step(model: Path, plugin: str, precision: str, share_prompts: bool) -> dict[str, float]:
    """Return the figures of the second of two steps."""
    torch.cuda.reset_peak_memory_stats()
    rng = np.random.default_rng(0)
    rewards = np.arange(COMPLETIONS, dtype=float)
    lengths = [TOKENS] * COMPLETIONS
    groups = [make_group(rng, lengths, prompt=PROMPT_TOKENS, rewards=rewards, temperature=1.0) for _ in range(GROUPS)]
    settings = LearnerSettings(
        plugin=plugin, precision=precision, share_prompts=share_prompts, gradient_checkpointing=True
    )
    learner = create_learner(settings, model, Run(sampling={"max_new_tokens": TOKENS}))
    learner.train_step(groups)
    found = learner.train_step(groups)
    tokens_per_second = found["forward_tokens"] / found["train_step_seconds"]
    flops = 6 * sum(np.prod(shape) for _, _, shape in learner.weight_specs()) * tokens_per_second
    peak = next((peak for name, peak in PEAK_FLOPS.items() if name in torch.cuda.get_device_name()), None)
    return {
        "tokens_per_second": round(tokens_per_second),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        **({"mfu": round(flops / peak, 3)} if peak else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("plugins", nargs="+", metavar="PLUGIN:PRECISION")
    parser.add_argument("--large", action="store_true", help="also a model of 0.5 billion parameters")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        small = make_model(Path(folder) / "small")
        large = make_model(Path(folder) / "large", dtype=torch.bfloat16, **LARGE) if options.large else None
        for one in options.plugins:
            plugin, precision = one.split(":")
            found[plugin] = small_step(small, plugin, precision)
            for shared in (True, False) if large else ():
                gc.collect()
                name = "shared_prompts" if shared else "each_prompt"
                found[plugin][name] = large_step(large, plugin, precision, shared)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
