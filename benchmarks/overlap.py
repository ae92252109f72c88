"""Generating and training at once: a step's time beside the longer of the two, each on a core of its own.

Rollout and trainer have one core each, the other services share both. A model of 30 M parameters, prompts of 9 tokens,
completions of up to 64. With `max_staleness` 0 nothing overlaps: a step's time then is what generating its batch takes
(the trainer's wait) and what training it takes. The number of completions decides which is longer, because generating
costs per step of the decoder and training per token; the run takes the number for which they are most alike. With
`max_staleness` 1 and 2 a step can take no less than the longer one: that is the limit.

It prints where the trainer's time goes, publishing weights and fetching batches included.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from grpo_runs import Round, Size, ours, print_account, shown, write_model
from measuring import Figure, report

PINNED = {"generate: rollout": 0, "train: trainer": 1}
WAITS, STEP = "trainer: waits for the batch", "step"
GROUPS = (2, 4, 8)  # of a step, of four completions


def run(size: Size, staleness: int) -> Round:
    """Run ours, pinned, and print it."""
    done = ours(size, "transformers", staleness, PINNED)
    shown(size, f"max_staleness {staleness}", done)
    print_account(size, f"max_staleness {staleness}", done)
    return done


def parts(alone: Round) -> tuple[float, float]:
    """Return the milliseconds of generating and of training a batch, of a run in which nothing overlaps."""
    return alone.account[WAITS], alone.account[STEP] - alone.account[WAITS]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        model = write_model("30 M", Path(name))
        sizes = [
            Size(f"{groups} × 4", model, groups, 64, 14, 4, skip_zero_advantage=False, trainer_threads=1, completions=4)
            for groups in GROUPS
        ]
        alone = {size: parts(run(size, 0)) for size in sizes}
        size = min(sizes, key=lambda each: max(alone[each]) / min(alone[each]))
        generating, training = alone[size]
        print(f"{size.name}: generating {generating:.0f} ms, training {training:.0f} ms", file=sys.stderr)
        size = replace(size, steps=28)
        figures = [
            Figure(
                f"overlap: step, max_staleness {staleness}",
                "ms",
                run(size, staleness).account[STEP],
                max(generating, training),
                "the longer of generating and training",
                "lower",
            )
            for staleness in (1, 2)
        ]
    report(*figures)


if __name__ == "__main__":
    main()
