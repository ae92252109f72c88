"""`quartet plot`: learning curves of one run or several, from their metrics.jsonl, as a PNG. Needs matplotlib."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from quartet_client.errors import InputError
from quartet_client.progress import figure_of
from quartet_client.terminal import echo
from quartet_common.plugins import install_command


@dataclass(frozen=True)
class Curves:
    """A run's metrics by optimizer step."""

    name: str
    steps: list[int]
    times: list[float]
    metrics: list[dict[str, float]]
    evaluations: list[tuple[int, dict[str, float]]]

    def series(self, metric: str) -> list[float]:
        """Return one metric, a value a step; NaN where a step lacks it."""
        return [row.get(metric, float("nan")) for row in self.metrics]


def read_curves(folder: Path) -> Curves:
    """Read a run's folder. Raises FileNotFoundError if it has no metrics.jsonl.

    A run that was resumed wrote some steps twice: the last writing counts.
    """
    steps: dict[int, dict] = {}
    evaluations: dict[int, dict[str, float]] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "step":
            steps[row["step"]] = row
        elif row["kind"] == "evaluation":
            evaluations.setdefault(row["policy_version"], {}).update(_metrics_of(row))
    rows = [steps[step] for step in sorted(steps)]
    return Curves(
        name=folder.name,
        steps=[row["step"] for row in rows],
        times=[row["time"] for row in rows],
        metrics=[_metrics_of(row) for row in rows],
        evaluations=sorted(evaluations.items()),
    )


def _metrics_of(row: dict) -> dict[str, float]:
    return {name: value for name, value in row.items() if "/" in name}


def plot_runs(folders: Sequence[Path], output: Path) -> None:
    """Draw held-out accuracy, reward, completion length and staleness of the runs into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [read_curves(folder) for folder in folders]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    panels = [
        (axes[0, 1], "reward/mean", "Mean reward of the batch"),
        (axes[1, 0], "completions/mean_length", "Tokens per completion"),
        (axes[1, 1], "staleness/mean", "Staleness: steps between a group's weights and its update"),
    ]
    # Okabe and Ito's colours: they can be told apart by colour-blind readers.
    colours = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
    for run, colour in zip(runs, colours * len(runs), strict=False):
        names = sorted({name for _, metrics in run.evaluations for name in metrics if name.endswith("/ans_acc")})
        for name, style in zip(names, ["-", "--", ":", "-."] * len(names), strict=False):
            held = name.removeprefix("eval/").removesuffix("/ans_acc")
            known = [(version, figure_of(metrics, held, "ans_acc")) for version, metrics in run.evaluations]
            points = [(version, 100 * accuracy) for version, accuracy in known if accuracy is not None]
            if not points:
                continue
            label = f"{run.name}: {held}"
            axes[0, 0].plot(*zip(*points, strict=True), style, color=colour, marker="o", markersize=4, label=label)
            ends = [(version, *_interval(metrics, held)) for version, metrics in run.evaluations]
            axes[0, 0].fill_between(*zip(*ends, strict=True), color=colour, alpha=0.12, linewidth=0)
        for axis, metric, _ in panels:
            values = run.series(metric)
            axis.plot(run.steps, values, color=colour, alpha=0.25, linewidth=1)
            axis.plot(run.steps, _smoothed(values), color=colour, linewidth=1.8, label=run.name)
    axes[0, 0].set(title="Accuracy on held-out problems and its 95% interval, %", ylim=(0, 100))
    if axes[0, 0].lines:
        axes[0, 0].legend(loc="lower right", fontsize=8)
    else:
        axes[0, 0].text(0.5, 0.5, "–: no answer was judged", transform=axes[0, 0].transAxes, ha="center")
    for axis, _, title in panels:
        axis.set_title(title)
    for axis in axes.flat:
        axis.set_xlabel("optimizer steps")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(output, dpi=130)
    plt.close(figure)


def _interval(metrics: dict[str, float], held: str) -> list[float]:
    """Return the ends of the accuracy's interval in percent; NaN where there is none."""
    ends = [figure_of(metrics, held, key) for key in ("ans_acc_low", "ans_acc_high")]
    return [float("nan") if end is None else 100 * end for end in ends]


def _smoothed(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Return the exponential moving average, without its pull to zero at the start, as TensorBoard draws it."""
    smooth: list[float] = []
    total = 0.0
    for count, value in enumerate(values, start=1):
        total = weight * total + (1 - weight) * value
        smooth.append(total / (1 - weight**count))
    return smooth


@click.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The PNG. Default: learning_curve.png in FOLDER; of several, learning_curve-A-B.png in the first.",
)
def plot(folders: tuple[Path, ...], output: Path | None) -> int:
    """Draw accuracy, reward, length and staleness of the runs in FOLDER..., in one picture."""
    for folder in folders:
        if not (folder / "metrics.jsonl").is_file():
            raise InputError(f"'{folder}' is not the folder of a run with metrics: it has no metrics.jsonl")
    names = [folder.resolve().name for folder in folders] if len(folders) > 1 else []
    output = output or folders[0] / f"{'-'.join(['learning_curve', *names])[:200]}.png"
    try:
        plot_runs(folders, output)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise InputError(f"quartet plot needs matplotlib: {install_command('matplotlib')}") from error
    echo(output)
    return 0
