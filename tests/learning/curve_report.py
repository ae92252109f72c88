"""Reports learning curves as lines, a table and pictures."""

import json
import re
import time
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from curve_cases import MOST_TOKENS, Case
from curve_runs import ROOT, Result

PICTURES = ROOT / "docs" / "learning"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
COMMAND = "make learn LEARN=--write"
HEADING = "## Learning curves"
# Okabe and Ito's colors, which color-blind readers can distinguish.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

Done = list[tuple[Case, Result]]


def line(case: Case, result: Result) -> str:
    """Return a run as a line of text."""
    curve = " → ".join(f"{accuracy:.0%}" for _, accuracy in result.evaluations)
    verdict = "" if case.holds(result.lift, result.lift_of_teacher) else "  BAR BROKEN"
    return (
        f"{case.name:26} seed {result.seed}  {curve}  {100 * result.lift:+.0f} points  "
        f"staleness {result.staleness:.1f}  {result.seconds:.0f} s{verdict}"
    )


@dataclass(frozen=True)
class Compared:
    """The tokens of a run until it was as good as its control in the end."""

    case: str
    seed: int
    accuracy: float
    """The control's last held-out accuracy."""
    control: int
    """Tokens that the control generated."""
    tokens: int | None
    """Tokens until the first evaluation with this accuracy; None: there was none."""

    @property
    def holds(self) -> bool:
        return self.tokens is not None and self.tokens <= MOST_TOKENS * self.control

    @property
    def line(self) -> str:
        """It as a line of text."""
        found = "not reached" if self.tokens is None else f"{self.tokens:,}, {self.tokens / self.control:.0%}"
        return f"{self.case}, seed {self.seed}: tokens until {self.accuracy:.0%}: {self.control:,} → {found}"


def compared(results: Done) -> list[Compared]:
    """Compare the runs that have a control with the control's run of the same seed, where there is one."""
    known = {(case.name, result.seed): result for case, result in results}
    found = []
    for case, result in results:
        control = known.get((case.control, result.seed))
        if control is not None:
            accuracy = control.evaluations[-1][1]
            tokens = result.tokens_until(accuracy)
            found.append(Compared(case.name, result.seed, accuracy, control.tokens[-1][1], tokens))
    return found


def save(path: Path, results: Done) -> None:
    """Write all results as one JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{**asdict(result), "lift": result.lift} for _, result in results], indent=1) + "\n")


def write(results: Done) -> None:
    """Write the pictures, and replace the table in benchmarks/RESULTS.md."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    draw(chosen(results, "algorithms", "control"), "Held-out accuracy: each algorithm, three seeds", "algorithms")
    draw(chosen(results, "staleness"), "Held-out accuracy: GRPO by max_staleness", "staleness")
    draw(chosen(results, "sft"), "Held-out accuracy: supervised fine-tuning from an untrained model", "sft")
    draw(chosen(results, "distillation"), "Held-out accuracy: a teacher by GRPO, and its students", "distillation")
    draw(chosen(results, "curriculum"), "Held-out accuracy: a mixture, with and without curriculum", "curriculum")
    text = PAGE.read_text() if PAGE.exists() else "# Benchmarks\n"
    # From this heading to the next of its level, or to the end.
    before = re.sub(rf"\n{HEADING}\n.*?(?=\n## |\Z)", "", text, flags=re.DOTALL)
    PAGE.write_text(f"{before.rstrip()}\n\n{section(results)}")


def chosen(results: Done, *groups: str) -> Done:
    return [(case, result) for case, result in results if case.group in groups]


def section(results: Done) -> str:
    """Return the page's section, with a row per case."""
    rows = [("run", "seeds", "held-out accuracy at the start", "at the end", "points gained", "staleness")]
    for case, pairs in groupby(results, key=lambda pair: pair[0]):
        runs = [result for _, result in pairs]
        starts, ends = ([run.evaluations[place][1] for run in runs] for place in (0, -1))
        lifts = ", ".join(f"{100 * run.lift:+.0f}" for run in runs)
        stale = sum(run.staleness for run in runs) / len(runs)
        rows.append((case.name, str(len(runs)), percents(starts), percents(ends), lifts, f"{stale:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rows.insert(1, tuple("-" * width for width in widths))
    table = (
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    )
    steps = ", ".join(sorted({str(result.steps) for _, result in results}))
    minutes = sum(result.seconds for _, result in results) / 60
    return f"""{HEADING}

Written by `{COMMAND}` on {time.strftime("%Y-%m-%d")}: {len(results)} runs of {steps} optimizer steps from one warmed-up
model, {minutes:.0f} minutes in all, on two cores that other work shared. [docs/learning.md](../docs/learning.md) says
what was run and shows the curves.

{chr(10).join(table)}
{token_table(results)}"""


def token_table(results: Done) -> str:
    """Return the table of runs with a control; "" without one."""
    rows = [
        f"| {one.case} | {one.seed} | {one.accuracy:.0%} | {one.control:,} | "
        + ("not reached | |" if one.tokens is None else f"{one.tokens:,} | {one.tokens / one.control:.0%} |")
        for one in compared(results)
    ]
    if not rows:
        return ""
    head = "| run | seed | accuracy of its control | the control's tokens | tokens until that accuracy | share |"
    return "\n".join(["", head, "|---|---|---|---|---|---|", *rows, ""])


def percents(shares: list[float]) -> str:
    """Return shares in percent: lowest to highest."""
    low, high = f"{100 * min(shares):.0f}", f"{100 * max(shares):.0f}"
    return f"{low}%" if low == high else f"{low}–{high}%"


def draw(results: Done, title: str, name: str) -> None:
    """Plot the held-out accuracy of every run (thin lines) and the mean of each case (thick)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    if not results:
        return
    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    names = list(dict.fromkeys(case.name for case, _ in results))
    for case, pairs in groupby(results, key=lambda pair: pair[0]):
        runs = [result.evaluations for _, result in pairs]
        color = COLORS[names.index(case.name) % len(COLORS)]
        style = "--" if "uncorrected" in case.name or case.shuffled else "-"
        for run in runs if len(runs) > 1 else []:
            axis.plot([step for step, _ in run], [100 * share for _, share in run], style, color=color, alpha=0.3, lw=1)
        steps = sorted(set.intersection(*({step for step, _ in run} for run in runs)))
        means = [100 * sum(dict(run)[step] for run in runs) / len(runs) for step in steps]
        axis.plot(steps, means, style, color=color, lw=2, marker="o", markersize=4, label=case.name)
    axis.set(title=title, xlabel="optimizer steps", ylabel="% of 256 held-out problems", ylim=(0, 100))
    axis.legend(fontsize=8, loc="upper left")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURES / f"{name}.png", dpi=100)
    plt.close(figure)
