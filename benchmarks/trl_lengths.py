"""GRPO with prompts of 256 and 1,024 tokens beside TRL's `GRPOTrainer`: models of 30 M and 125 M, groups of 8 and 16.

Both sides are those of trl_grpo.py; the model is untrained and gets no reward, so ours is configured to skip nothing.
Up to 256 new tokens a completion; random weights end most earlier, alike on both sides, and the length is printed. No
two prompts share a beginning. TRL has what made it fastest on the first of these sizes: one thread or two, a step's
completions at once or four at a time (which pads less). It generates with transformers: its vLLM server gets weights by
NCCL alone. Its steps are alike, so that one of them is measured after another; of ours three, after two.

Two rows compare arithmetic with what the machine can do: matrix products of 2,048², in as many processes as there are
cores, at once, before and after. It is the arithmetic of the model's matrices alone, without attention: two operations
a parameter for each generated token and each token of a group's prompt, computed once, and six for each of them that is
trained. That of a step is divided by its time; that of training by the trainer's processor time.
"""

import json
import os
import random
import statistics
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from grpo_runs import Round, Size, make_environment, ours, print_account, shown, trl, write_model
from measuring import ENVIRONMENTS, Figure, report

NEW_TOKENS = 256
PRODUCTS = """
import time, torch
torch.set_num_threads(1)
a, b = torch.randn(2, 2048, 2048)
a @ b
began, used, done = time.perf_counter(), time.process_time(), 0
while (spent := time.perf_counter() - began) < 4:
    a @ b
    done += 2 * 2048**3
print(done / spent, done / (time.process_time() - used))
"""


def write_problems(path: Path, tokens: int) -> Path:
    """Write problems of so many characters, each a token, after examples that no other problem has; return the path."""
    rng = random.Random(0)

    def example() -> tuple[str, int]:
        first, second = rng.randrange(100, 1000), rng.randrange(100, 1000)
        return f"{first}+{second}=", first + second

    with path.open("w") as file:
        for number in range(512):
            question, answer = example()
            while len(question) < tokens:
                text, total = example()
                question = f"{text}{total} {question}"
            row = {"id": str(number), "prompt": question[-tokens:], "gt_answer": str(answer)}
            file.write(json.dumps(row) + "\n")
    return path


def operations_per_second() -> tuple[float, float]:
    """Return the floating-point operations of matrix products in a process per core, at once: per second, of all, and
    per second of a processor."""
    command = [str(ENVIRONMENTS / "trainer" / "bin" / "python"), "-c", PRODUCTS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(os.cpu_count() or 1)
    ]
    printed = [process.communicate(timeout=60)[0].split() for process in running]
    of_all, of_one = zip(*[(float(wall), float(used)) for wall, used in printed], strict=True)
    return sum(of_all), statistics.mean(of_one)


def operations_per_token(size: Size) -> float:
    """Return the floating-point operations of the model's matrices for a token, forward."""
    config = json.loads((size.model / "config.json").read_text())
    hidden, heads, shared = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    layer = 2 * hidden**2 * (1 + shared / heads) + 3 * hidden * config["intermediate_size"]
    return 2 * (config["num_hidden_layers"] * layer + hidden * config["vocab_size"])


def fastest_trl(size: Size) -> tuple[int, int, Round]:
    """Return TRL's best settings, threads and completions at a time (0: a step's), and their round."""
    rounds = []
    for threads, micro_batch in ((2, 0), (1, 0), (2, 4)):
        name = f"TRL, {threads} threads, {micro_batch or size.batch} at a time"
        rounds.append((threads, micro_batch, shown(size, name, trl(size, threads, micro_batch))))
    return max(rounds, key=lambda each: each[2].rate)


def main() -> None:
    make_environment()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = {tokens: write_problems(folder / f"{tokens}.jsonl", tokens) for tokens in (256, 1024)}
        models = {size: write_model(size, folder / size.replace(" ", "")) for size in ("30 M", "125 M")}

        def made(model: str, prompt: int, prompts: int, completions: int) -> Size:
            return Size(
                f"{model}, prompts of {prompt:,}, {prompts} × {completions}", models[model], prompts, NEW_TOKENS, 5, 2,
                skip_zero_advantage=False, trainer_threads=2, completions=completions, data=data[prompt], peer_steps=2,
                seconds=900.0,
            )  # fmt: skip

        first = made("30 M", 256, 2, 8)
        threads, micro_batch, best = fastest_trl(first)
        peer = f"TRL GRPOTrainer, {threads} threads, {micro_batch or 'all'} at a time"

        def compare(size: Size, engine: str = "transformers", theirs: Round | None = None) -> Round:
            mine = shown(size, f"ours, {engine}", ours(size, engine))
            theirs = theirs or shown(size, peer, trl(size, threads, micro_batch))
            name = f"trl_lengths: {size.name}, {engine} engine"
            figures.append(Figure(name, "completions/s", mine.rate, theirs.rate, peer, "higher"))
            print_account(size, f"ours, {engine}", mine)
            print_account(size, peer, theirs)
            return mine

        before = operations_per_second()
        mine = compare(first, theirs=best)
        after = operations_per_second()
        compare(first, "vllm", best)
        compare(replace(first, name=f"{first.name}, LoRA of rank 16", lora=16))
        compare(made("30 M", 256, 2, 16))
        compare(made("30 M", 1024, 2, 8))
        compare(made("125 M", 256, 2, 8))
        compare(replace(made("125 M", 1024, 1, 8), steps=4))
        limit = "matrix products in a process per core, at once"
        all_cores, one_core = (statistics.mean(pair) for pair in zip(before, after, strict=True))
        forward = operations_per_token(first) * (first.prompts * 256 + first.batch * mine.length)
        step, training = mine.account["step"] / 1000, mine.account["processor, train: trainer"] / 1000
        for name, done, most in (
            ("arithmetic of a step", 4 * forward / step, all_cores),
            ("arithmetic of training", 3 * forward / training, one_core),
        ):
            title = f"trl_lengths: 30 M, prompts of 256, {name}"
            figures.append(Figure(title, "GFLOP/s", done / 1e9, most / 1e9, limit, "higher"))
    report(*figures)


if __name__ == "__main__":
    main()
