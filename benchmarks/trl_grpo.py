"""GRPO end to end: the four services beside TRL's `GRPOTrainer`, completions trained per second of wall time.

Both train the same model on the same problems with the same reward: 16 prompts × 8 completions a step, at most 32 new
tokens, temperature 1, AdamW at the same rate, clip 0.2 / 0.28, token mean, no KL, float32, one optimizer step a batch.
Groups whose rewards are all equal have no gradient: ours skips their forward and backward pass, TRL computes it.

- Ours: broker, Redis, reward service, rollout and trainer as processes, `max_staleness = 1`: the rollout generates the
  next batch during training; with the tiny model also 2, so that it does not wait for weights. One thread in each
  process, but two in the trainer of the larger model, which has more work than the rollout. With the transformers
  engine; results with vLLM are shown as well.
- TRL: one process in its own environment (`bench-trl`), generating with transformers, with one and with two threads. On
  a CPU it generates and trains in turn. The faster of the two counts.

Rates are measured from the end of an early step to the end of the last one, without start, evaluations and checkpoints,
which neither makes. Two models: the demo's, warmed up, with 0.3 M parameters, over the demo's 110 steps and over the
first 40 of them; and an untrained one of 30 M with 4 prompts per step and up to 64 new tokens. That one gets no reward,
so ours is configured to skip nothing. Sides run in turn, ours, TRL's, ours, TRL's; a figure is the mean of two.

It also prints the parts of a step's time, by the trainer's metrics and the processor time of each process. The
processor time of a step is a figure too, because it bounds the rates.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from grpo_runs import MODEL_DATA, Round, Size, make_environment, mean_of, ours, print_account, shown, trl, write_model
from measuring import ENVIRONMENTS, ROOT, Figure, report

ROUNDS = 2


def compare(size: Size, *, staler: bool = False) -> tuple[Round, ...]:
    """Return ours, TRL's, and if it is wanted ours with max_staleness 2; each the mean of its rounds, printed too."""
    rounds: dict[str, list[Round]] = {"ours": [], "TRL": [], "staler": []}
    for _ in range(ROUNDS):
        rounds["ours"].append(shown(size, "ours, transformers", ours(size, "transformers")))
        rounds["TRL"].append(shown(size, "TRL, 2 threads", trl(size, 2)))
        if staler:
            rounds["staler"].append(shown(size, "ours, max_staleness 2", ours(size, "transformers", staleness=2)))
    return tuple(mean_of(done) for done in rounds.values() if done)


def main() -> None:
    prepare = [ENVIRONMENTS / "trainer" / "bin" / "python", ROOT / "examples/arithmetic/prepare.py", MODEL_DATA]
    subprocess.run([*map(str, prepare)], check=True, timeout=300, stdout=sys.stderr)
    make_environment()
    figures = []

    def compared(size: Size, engine: str, done: Round, peer_name: str, peer: Round) -> Figure:
        name = f"trl_grpo: {size.name}, {engine} engine"
        return Figure(name, "completions/s", done.rate, peer.rate, peer_name, "higher")

    tiny = Size("0.3 M", MODEL_DATA / "model", 16, 32, 110, 8, skip_zero_advantage=True, trainer_threads=1, early=40)
    mine, theirs, staler = compare(tiny, staler=True)
    single = shown(tiny, "TRL, 1 thread", trl(tiny, 1))
    best, name = max(((theirs, "TRL GRPOTrainer, 2 threads"), (single, "TRL GRPOTrainer, 1 thread")), key=rate)
    figures.append(compared(tiny, "transformers", mine, name, best))
    two = "trl_grpo: 0.3 M, transformers engine, max_staleness 2"
    figures.append(Figure(two, "completions/s", staler.rate, best.rate, name, "higher"))
    early = "trl_grpo: 0.3 M, transformers engine, steps 9 to 40"
    figures.append(Figure(early, "completions/s", mine.early_rate, best.early_rate, name, "higher"))
    # What completions per second are bounded by, where all cores are busy all the time.
    cost, used = "trl_grpo: 0.3 M, transformers engine, processor time of a step", "processor, all of it"
    figures.append(Figure(cost, "ms", mine.account[used], best.account[used], name, "lower"))
    figures.append(compared(tiny, "vllm", shown(tiny, "ours, vLLM", ours(tiny, "vllm")), name, best))
    print_account(tiny, "ours", mine)
    print_account(tiny, "ours, max_staleness 2", staler)
    print_account(tiny, name, best)
    with tempfile.TemporaryDirectory() as folder:
        big = Size("30 M", write_model("30 M", Path(folder)), 4, 64, 7, 2, skip_zero_advantage=False, trainer_threads=2)
        mine, theirs = compare(big)
        figures.append(compared(big, "transformers", mine, "TRL GRPOTrainer, 2 threads", theirs))
        print_account(big, "ours", mine)
        print_account(big, "TRL", theirs)
    report(*figures)


def rate(pair: tuple[Round, str]) -> float:
    return pair[0].rate


if __name__ == "__main__":
    main()
