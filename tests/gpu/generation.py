"""vLLM through the rollout's engine: `generation.py [--large]` prints a JSON object. Runs in the rollout's environment.

Compares the log-prob of each token with transformers' in float32: with the weights as loaded, during and after an
update, with masks and, if vLLM can sleep, after each sleep level. transformers runs in another process, because vLLM
may patch model classes. With --large: a model of 0.5 billion parameters in bf16, on a GPU.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "services" / "rollout" / "tests" / "engines"), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from harness import PROMPT, PROMPTS, Harness, Sender  # noqa: E402
from sizes import write  # noqa: E402

from quartet_rollout.engines import Engine, EngineCompletion, SamplingSettings, create_engine  # noqa: E402

OPTIONS: dict[bool, dict[str, Any]] = {
    False: {"kv_cache_gib": 0.0625, "max_num_seqs": 64, "max_num_batched_tokens": 4096},
    True: {"kv_cache_gib": 4, "max_num_seqs": 64, "gpu_memory_utilization": 0.5, "sleep_mode": True},
}
CUT = {"top_k": 5, "top_p": 0.9, "masks": True}


class Truth:
    """An engine's completions, by the weights of which the engine reports each part to be."""

    def __init__(self, engine: Engine, options: dict[str, Any], folders: tuple[Path, Path], run: Any, sender: Sender):
        self._harness = Harness(engine, options, folders, run, sender)
        self._engine, self._folders, self._run = engine, folders, run
        self.spans: list[dict[str, Any]] = []
        """Of versions 0 and 1, whose weights are in the two folders."""
        run(engine.set_version(0))

    def prove(self) -> dict[str, Any]:
        """Generate before, during and after an update, and after each sleep. Returns results other than log-probs."""
        capabilities = self._engine.capabilities()
        found: dict[str, Any] = {"masks": "sampling_masks" in capabilities, "sleep": {}}
        self._draw("as loaded")
        found["carried over"] = self._run(self._update_in_flight())
        self._draw("after the update")
        if found["masks"]:
            self._draw("masks", **CUT)
        for level in (1, 2) if "sleep" in capabilities else ():
            found["sleep"][str(level)] = self._sleep(level)
        return found

    def _draw(self, kind: str, **sampling: Any) -> None:
        for prompt in PROMPTS:
            self._keep(kind, prompt, self._harness.generate(prompt, n=4, max_new_tokens=64, **sampling))

    def _keep(self, kind: str, prompt: list[int], completions: list[EngineCompletion]) -> None:
        for each in completions:
            mask = [each.mask.counts.tolist(), each.mask.token_ids.tolist()] if each.mask is not None else None
            tokens, log_probs = each.token_ids.tolist(), each.log_probs.tolist()
            for version, begin, end in each.version_spans:
                made = {"prompt": prompt, "tokens": tokens, "log_probs": log_probs, "mask": mask}
                self.spans.append({"kind": kind, "version": version, "begin": begin, "end": end, **made})

    async def _update_in_flight(self) -> int:
        """Return the number of completions with tokens of both versions."""
        harness = self._harness
        running = asyncio.create_task(harness.collect(PROMPT, 8, SamplingSettings(max_new_tokens=200)))
        await harness.started(20)
        await harness.update(self._folders[1], 1)
        completions = await running
        self._keep("over an update", PROMPT, completions)
        return sum([span[0] for span in each.version_spans] == [0, 1] for each in completions)

    def _sleep(self, level: int) -> dict[str, Any]:
        """Sleep and wake between two greedy completions of a prompt that is not in the prefix cache."""

        def greedy() -> list[EngineCompletion]:
            return self._harness.generate([20 + level, *PROMPT], temperature=0.0, max_new_tokens=64)

        before, (free, _) = greedy(), torch.cuda.mem_get_info()
        self._run(self._engine.sleep(level))
        freed = (torch.cuda.mem_get_info()[0] - free) / 2**30
        self._run(self._engine.wake())
        if level == 2:
            assert self._engine.policy_version == -1, "the weights were forgotten, and have a version"
            self._run(self._harness.update(self._folders[1], 1))
        after = greedy()
        self._keep(f"after sleep of level {level}", [20 + level, *PROMPT], after)
        same = before[0].token_ids.tolist() == after[0].token_ids.tolist()
        return {"freed_gib": round(freed, 2), "same_tokens": same}


def compare(folders: tuple[Path, Path], spans: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest difference of log-probs from transformers', by kind; infinite for a token outside its mask."""
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    distances: dict[str, list[np.ndarray]] = {}
    for span in spans:
        ids = torch.tensor([[*span["prompt"], *span["tokens"]]])
        with torch.no_grad():
            logits = models[span["version"]](ids).logits[0, len(span["prompt"]) - 1 : -1]
        if span["mask"] is not None:
            counts, candidates = span["mask"]
            left = torch.full_like(logits, -torch.inf)
            rows = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
            left[rows, candidates] = 0
            logits = logits + left
        every = torch.log_softmax(logits, dim=-1)
        expected = every.gather(-1, ids[0, len(span["prompt"]) :, None])[:, 0].numpy()
        off = np.abs(expected - np.array(span["log_probs"], np.float32))[span["begin"] : span["end"]]
        distances.setdefault(span["kind"], []).append(off)
    return {kind: float(np.concatenate(each).max()) for kind, each in distances.items()}


def main(large: bool) -> None:
    # Fork the other process before vLLM and OpenMP start threads.
    other = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    other.submit(int).result()
    sender = Sender(Path(os.devnull))
    with tempfile.TemporaryDirectory() as made, other, closing(sender), asyncio.Runner() as runner:
        folders = Path(made) / "0", Path(made) / "1"
        for seed, folder in enumerate(folders):
            write("0.5 B" if large else "0.3 M", folder, seed)
        engine = create_engine("vllm", str(folders[0]), OPTIONS[large])
        try:
            runner.run(engine.start())
            truth = Truth(engine, OPTIONS[large], folders, runner.run, sender)
            found = truth.prove()
        finally:
            runner.run(engine.close())
        print(json.dumps({"largest": other.submit(compare, folders, truth.spans).result(), **found}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--large", action="store_true", help="a model of 0.5 billion parameters")
    main(parser.parse_args().large)
