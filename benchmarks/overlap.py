"""Generating and training at once: a step's time beside the longer of the two, each on a core of its own.

Rollout and trainer have one core each, the other services share both. A model of 30 M parameters, prompts of 9 tokens,
completions of up to 64. With `max_staleness` 0 nothing overlaps: a step's time then is what generating its batch takes
(the trainer's wait) and what training it takes. The number of completions decides which is longer, because generating
costs per step of the decoder and training per token; the run takes the number for which they are most alike. With
`max_staleness` 1 and 2 a step can take no less than the longer one: that is the limit.

With `max_staleness` 1 each step waits for one batch's generating and one's training, which begin together and whose
times vary with the lengths of completions. The mean of the longer of two such times is more than the longer of their
means; over all pairs of the measured steps it is a second limit.

It prints where the trainer's time goes, publishing weights and fetching batches included.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean

from grpo_runs import Round, Size, ours, print_account, shown, write_model
from measuring import Figure, report

PINNED = {"generate: rollout": 0, "train: trainer": 1}
GROUPS = (2, 4, 8)  # of a step, of four completions


def run(size: Size, staleness: int) -> Round:
    """Run ours, pinned, and print it."""
    done = ours(size, "transformers", staleness, PINNED)
    shown(size, f"max_staleness {staleness}", done)
    print_account(size, f"max_staleness {staleness}", done)
    return done


def means(alone: Round) -> tuple[float, float]:
    """Return the milliseconds of generating and of training a batch, of a run in which nothing overlaps."""
    generating, training = zip(*alone.parts, strict=True)
    return mean(generating), mean(training)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        model = write_model("30 M", Path(name))
        sizes = [
            Size(f"{groups} × 4", model, groups, 64, 14, 4, skip_zero_advantage=False, trainer_threads=1, completions=4)
            for groups in GROUPS
        ]
        alone = {size: run(size, 0) for size in sizes}
        size = min(sizes, key=lambda each: max(means(alone[each])) / min(means(alone[each])))
        generating, training = means(alone[size])
        pairs = mean(max(one[0], other[1]) for one in alone[size].parts for other in alone[size].parts)
        print(f"{size.name}: generating {generating:.0f} ms, training {training:.0f} ms", file=sys.stderr)
        size = replace(size, steps=28)
        one, two = (run(size, staleness).account["step"] for staleness in (1, 2))
    name, longer = "overlap: step, max_staleness", "the longer of generating and training"
    report(
        Figure(f"{name} 1", "ms", one, max(generating, training), longer, "lower"),
        Figure(f"{name} 1, as lengths vary", "ms", one, pairs, f"{longer}, step by step", "lower"),
        Figure(f"{name} 2", "ms", two, max(generating, training), longer, "lower"),
    )


if __name__ == "__main__":
    main()
