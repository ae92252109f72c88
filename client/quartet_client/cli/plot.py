"""`quartet plot`: learning curves of runs' folders as a PNG."""

import difflib
from collections.abc import Sequence
from pathlib import Path

import click

from quartet_client.cli.compare import check_metrics
from quartet_client.errors import InputError
from quartet_client.progress import REWARD, by_whom, read_run
from quartet_client.terminal import echo
from quartet_common.python_file import install_command
from quartet_common.verifier_scores import by_verifier

_UNKNOWN = (float("nan"), float("nan"))
_WEIGHT = 0.8  # of the mean so far, in a smooth curve
_TITLES = {
    REWARD: "Mean reward of the batch",
    "completions/mean_length": "Tokens per completion",
    "staleness/mean": "Staleness: steps between a group's weights and its update",
}


def plot_runs(folders: Sequence[Path], output: Path, metrics: Sequence[str] = ()) -> None:
    """Draw held-out accuracy and metrics of the runs into one PNG, a panel for each.

    Args:
        metrics: their names; default: reward, that of each verifier if there are several, completion length, staleness.

    Raises:
        InputError: no run has such a metric.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = [read_run(folder) for folder in folders]
    there = list(dict.fromkeys(name for run in runs for _, step in run.rows() for name in step.metrics))
    for name in metrics:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=1) or there[:1]
            raise InputError(f"--metric: no step has '{name}'; did you mean '{''.join(close)}'? (docs/metrics.md)")
    verifiers = list(by_verifier(dict.fromkeys(there), "mean").values())
    names = metrics or [REWARD, *(verifiers if len(verifiers) > 1 else ()), *list(_TITLES)[1:]]
    rows = (len(names) + 2) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(11, 3.5 * rows), layout="constrained", squeeze=False)
    panels = [(axis, name, _TITLES.get(name, name)) for axis, name in zip(axes.flat[1:], names, strict=False)]
    for axis in axes.flat[1 + len(names) :]:
        axis.remove()
    # Okabe and Ito's colors, which color-blind readers can distinguish.
    colors = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
    for run, color in zip(runs, colors * len(runs), strict=False):
        styles = ["-", "--", ":", "-."] * len(run.evaluations)
        for held, style in zip(sorted(run.evaluations), styles, strict=False):
            evaluated = run.points(held)
            points = [(each.policy_version, 100 * each.accuracy) for each in evaluated if each.accuracy is not None]
            if not points:
                continue
            label = f"{run.run_id}: {held}{by_whom(evaluated[-1].judges)}"
            axes[0, 0].plot(*zip(*points, strict=True), style, color=color, marker="o", markersize=4, label=label)
            ends = [(point.policy_version, *(100 * end for end in point.interval or _UNKNOWN)) for point in evaluated]
            axes[0, 0].fill_between(*zip(*ends, strict=True), color=color, alpha=0.12, linewidth=0)
        for axis, metric, _ in panels:
            numbers = [number for number, _ in run.rows()]
            values = [step.metrics.get(metric, float("nan")) for _, step in run.rows()]
            axis.plot(numbers, values, color=color, alpha=0.25, linewidth=1)
            axis.plot(numbers, _smoothed(values), color=color, linewidth=1.8, label=run.run_id)
    axes[0, 0].set(title="Accuracy on held-out problems and its 95% interval, %", ylim=(0, 100))
    if axes[0, 0].lines:
        axes[0, 0].legend(loc="lower right", fontsize=8)
    else:
        axes[0, 0].text(0.5, 0.5, "–: no answer was judged", transform=axes[0, 0].transAxes, ha="center")
    for axis, _, title in panels:
        axis.set_title(title)
    for axis in figure.axes:
        axis.set_xlabel("optimizer steps")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(output, dpi=130)
    except OSError as error:
        raise InputError(f"cannot write '{output}': {error.strerror or error}") from error
    plt.close(figure)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Return the exponential moving average, without its pull to zero at the start, as TensorBoard draws it."""
    smooth: list[float] = []
    total = 0.0
    for count, value in enumerate(values, start=1):
        total = _WEIGHT * total + (1 - _WEIGHT) * value
        smooth.append(total / (1 - _WEIGHT**count))
    return smooth


@click.command()
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The PNG. Default: learning_curve.png in FOLDER; of several, learning_curve-A-B.png in the first.",
)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="A metric of metrics.jsonl; may be repeated.")
def plot(folders: tuple[Path, ...], output: Path | None, metrics: tuple[str, ...]) -> int:
    """Draw accuracy, rewards, length and staleness of the runs in FOLDER..., in one picture."""
    check_metrics(folders)
    names = [folder.resolve().name for folder in folders] if len(folders) > 1 else []
    output = output or folders[0] / f"{'-'.join(['learning_curve', *names])[:200]}.png"
    try:
        plot_runs(folders, output, metrics)
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise InputError(f"quartet plot needs matplotlib: {install_command('matplotlib')}") from error
    echo(output)
    return 0
