"""Tokens per second of our engines, beside the libraries they are made of on the same prompts and settings.

- The vllm engine (in_process), through `Engine.generate`; its peer is vLLM's own `LLM.generate` in-process, with `n`
  completions a prompt and log-probs on, configured as our engine configures it.
- The transformers engine, through `Engine.generate`; its peer is `model.generate` with `output_scores` on all
  completions as one batch, and the log-probs taken from the scores.

Each gives tokens and their log-probs under the distribution they were drawn from, as numpy arrays: what training needs.
16 prompts, 8 completions each, 32 new tokens at most, temperature 1, float32, one thread; a random model of the demo's
shape. Tokens are counted as they come, since a random model ends some completions early.

A process can hold one vLLM engine, so each of the four runs in a process of its own. They run in the order A B B A, two
processes each; a process's figure is the median of its measurements, and the mean of its two is reported.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from measuring import ROOT, Figure, report

PROMPTS, COMPLETIONS, NEW_TOKENS = 16, 8, 32
ROUNDS = 5
LIMIT_SECONDS = 100
PAIRS = {"vllm": "bare vLLM LLM.generate", "transformers": "model.generate"}


def prompts() -> list[list[int]]:
    """Token ids, a dozen each, no two prompts alike."""
    return [[16 + (index * 7 + position * 3) % 60 for position in range(12)] for index in range(PROMPTS)]


def rate(generate: Callable[[], int]) -> float:
    """Median tokens per second of a function that returns how many it generated; once for warm-up before."""
    generate()
    rates = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        tokens = generate()
        rates.append(tokens / (time.perf_counter() - started))
    return statistics.median(rates)


def engine(name: str, folder: str) -> float:
    """Ours."""
    from quartet_rollout.engines import SamplingSettings, create_engine

    sampling = SamplingSettings(temperature=1.0, max_new_tokens=NEW_TOKENS)

    async def group(running, request_id: str, prompt: list[int]) -> int:
        return sum([len(done.log_probs) async for done in running.generate(request_id, prompt, COMPLETIONS, sampling)])

    async def all_groups(running) -> int:
        return sum(await asyncio.gather(*(group(running, str(i), prompt) for i, prompt in enumerate(prompts()))))

    with asyncio.Runner() as runner:
        running = create_engine(name, folder, {"max_num_seqs": PROMPTS * COMPLETIONS})
        runner.run(running.start())
        try:
            return rate(lambda: runner.run(all_groups(running)))
        finally:
            runner.run(running.close())


def bare_vllm(folder: str) -> float:
    """vLLM in this process, configured as our engine configures it, but for what weight updates need."""
    from quartet_rollout.engines.options import VllmOptions
    from quartet_rollout.engines.vllm_engine import environment

    options = VllmOptions(max_num_seqs=PROMPTS * COMPLETIONS)
    environment.prepare(options)
    import numpy as np
    import torch
    from vllm import LLM, SamplingParams

    from quartet_rollout.engines.vllm_engine.arguments import engine_arguments

    torch.set_num_threads(1)
    arguments = engine_arguments(folder, options)
    del arguments["weight_transfer_config"]
    if arguments["enforce_eager"]:
        environment.disable_compilation()
    llm = LLM(**arguments)
    sampling = SamplingParams(
        n=COMPLETIONS, temperature=1.0, max_tokens=NEW_TOKENS, logprobs=0, flat_logprobs=True, detokenize=False
    )

    def generate() -> int:
        requests = [{"prompt_token_ids": prompt} for prompt in prompts()]
        done = [one for output in llm.generate(requests, sampling, use_tqdm=False) for one in output.outputs]
        return sum(len(np.array(one.logprobs.logprobs, dtype=np.float32)) for one in done)

    return rate(generate)


def bare_transformers(folder: str) -> float:
    """`model.generate` over all completions as one batch."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    inputs = torch.tensor(prompts()).repeat_interleave(COMPLETIONS, 0)
    end = model.generation_config.eos_token_id
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": NEW_TOKENS, "pad_token_id": end}

    def generate() -> int:
        with torch.no_grad():
            result = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                output_scores=True,
                return_dict_in_generate=True,
                **settings,
            )
        tokens = result.sequences[:, inputs.shape[1] :]
        scores = torch.log_softmax(torch.stack(result.scores, dim=1), dim=-1)
        log_probs = scores.gather(-1, tokens[..., None])[..., 0]
        ended_before = (tokens == end).cumsum(1) - (tokens == end).long()
        return len(log_probs[ended_before == 0].numpy())

    return rate(generate)


BARE = {"vllm": bare_vllm, "transformers": bare_transformers}


def measure(name: str, side: str, folder: str) -> float:
    """Run one side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, name, folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} {name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    sys.path.append(str(ROOT / "services/rollout/tests/engines"))
    from models import write_model

    figures = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), tied=True, seed=0)
        for name, peer_name in PAIRS.items():
            measured: dict[str, list[float]] = {"ours": [], "peer": []}
            for side in ("ours", "peer", "peer", "ours"):
                measured[side].append(measure(name, side, folder))
            ours, peer = (statistics.mean(measured[side]) for side in ("ours", "peer"))
            figures.append(Figure(f"engines: {name}, 128 x 32", "tokens/s", ours, peer, peer_name, "higher"))
    report(*figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", nargs=3, metavar=("ours|peer", "ENGINE", "FOLDER"))
    chosen = parser.parse_args().side
    if chosen:
        side, name, folder = chosen
        print(json.dumps(engine(name, folder) if side == "ours" else BARE[name](folder)), flush=True)
    else:
        main()
