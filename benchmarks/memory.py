"""Peak memory of a step at four times the length, and beside it that of a plain PyTorch step.

Each length has its own process, forked after the imports, which makes one step of a warm-up length (so that the
optimizer's state and the libraries' own memory are allocated) and then one step with one sequence of the given length.
The figure is the increase of resident memory during that step, at its peak. The limit: four times the length takes at
most 4.5 times the memory.

Ours: `Learner.train_step`, whose logits exist a chunk at a time. Peer: the same model and loss in plain PyTorch, logits
of the whole sequence at once. The model has 128 hidden dimensions, 2 layers and a vocabulary of 32,768; one thread.
"""

import gc
import multiprocessing
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from measuring import ROOT, Figure, report

sys.path.extend([f"{ROOT}/services/trainer/tests", f"{ROOT}/services/trainer/tests/learner"])

from learner_helpers import Run, make_group, make_model
from reference import load

from quartet_trainer.learner import LearnerSettings, create_learner

SHORT, LONG = 1024, 4096
WARM_UP, PROMPT = 64, 16
VOCABULARY = 32768
BAR = 4.5


def main() -> None:
    torch.set_num_threads(1)
    figures = []
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256}
        make_model(path, **sizes, max_position_embeddings=8192, initializer_range=0.02)
        plain = mebibytes(path, "plain", LONG)
        for who, label in (("ours", ""), ("recomputing", ", gradient checkpointing")):
            short, long = mebibytes(path, who, SHORT), mebibytes(path, who, LONG)
            growth = f"memory: step at {LONG} tokens / at {SHORT}{label}"
            figures.append(Figure(growth, "x", long / short, BAR, "limit", "lower"))
            figures.append(
                Figure(f"memory: step of {LONG} tokens{label}", "MiB", long, plain, "plain PyTorch", "lower")
            )
    report(*figures)


def mebibytes(model: Path, who: str, length: int) -> float:
    """Return the peak increase of resident memory of a step in its own process."""
    with multiprocessing.get_context("fork").Pool(1) as process:
        found = process.apply_async(child, (model, who, length)).get(timeout=150)
    print(f"{who}, {length} tokens: {found:.0f} MiB", file=sys.stderr, flush=True)
    return found


def resident() -> tuple[float, float]:
    """Resident memory of this process now, and its greatest since it was last reset, in MiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))


def child(model: Path, who: str, length: int) -> float:
    torch.set_num_threads(1)
    step = plain_step(model) if who == "plain" else our_step(model, recompute=who == "recomputing")
    rng = np.random.default_rng(0)
    step(rng, WARM_UP)
    gc.collect()
    before, _ = resident()
    Path("/proc/self/clear_refs").write_text("5")  # the greatest is the present one again
    step(rng, length)
    _, greatest = resident()
    return greatest - before


def our_step(model: Path, recompute: bool):
    settings = LearnerSettings(gradient_checkpointing=recompute, micro_batch_tokens=LONG)
    learner = create_learner(settings, model, Run())

    def step(rng, length: int) -> None:
        # Two completions, for an advantage; the second has one token.
        group = make_group(rng, [length - PROMPT, 1], prompt=PROMPT, rewards=[1.0, 0.0], temperature=1.0)
        learner.train_step([group])

    return step


def plain_step(model: Path):
    network = load(model, torch.float32)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)

    def step(rng, length: int) -> None:
        ids = torch.from_numpy(rng.integers(0, VOCABULARY, (1, length)))
        logits = network(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 : -1]
        log_probs = torch.log_softmax(logits, dim=-1).gather(-1, ids[:, PROMPT:, None])[..., 0]
        ratio = torch.exp(log_probs - log_probs.detach())
        (-ratio.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
