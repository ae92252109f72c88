"""`quartet compare`: runs side by side, by the last values of their metrics and the settings in which they differ."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.table import Column
from rich.text import Text

from quartet_client.cli.options import json_option, print_json, table
from quartet_client.errors import InputError
from quartet_client.progress import MetricsFile, is_number
from quartet_client.terminal import Terminal
from quartet_common.run_file import RunFile
from quartet_common.text import one_line

_SHOWN = re.compile(
    r"reward/(.+/)?mean|eval/[^/]+/(ans_acc|reward|.+/mean)|train/loss|completions/mean_length", re.DOTALL
)
_NAMES = ("run.id", "run.folder", "addresses.")  # settings that say which run it is


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="A further metric; may be repeated.")
@json_option
def compare(runs: tuple[str, ...], metrics: tuple[str, ...], as_json: bool) -> int:
    """Compare runs, a row for each: steps, last rewards, evaluations, loss and length, and the settings that differ.

    RUN is the folder of a run, or the name of one in runs/. With --json all metrics are printed.
    """
    folders = [_folder_of(run) for run in runs]
    check_metrics(folders)
    print_comparison(folders, metrics, as_json)
    return 0


def _folder_of(run: str) -> Path:
    """Return the folder that an argument means. One of a run's name without metrics is that of its run file."""
    if "/" in run or (Path(run) / "metrics.jsonl").is_file():
        return Path(run)
    return Path("runs") / run


def check_metrics(folders: Sequence[Path]) -> None:
    """Raise InputError for a folder that is not one of a run with metrics."""
    for folder in folders:
        if not (folder / "metrics.jsonl").is_file():
            raise InputError(f"'{folder}' is not the folder of a run with metrics: it has no metrics.jsonl")


def print_comparison(folders: Sequence[Path], metrics: Sequence[str] = (), as_json: bool = False) -> None:
    """Print a table of runs, or JSON; one without metrics has no step yet. Raises InputError for an unknown metric."""
    found = [{"run": folder.resolve().name, "folder": str(folder), **_last_values(folder)} for folder in folders]
    names = list(dict.fromkeys(name for run in found for name in run["metrics"]))
    for name in metrics:
        if name not in names:
            raise InputError(f"--metric: no run has '{name}'; allowed: {', '.join(sorted(names))}")
    settings = [_settings(folder) for folder in folders]
    keys = dict.fromkeys(key for each in settings for key in each or ())
    known = [each for each in settings if each is not None]
    differing = [key for key in keys if any(each.get(key) != known[0].get(key) for each in known)]
    for run, each in zip(found, settings, strict=True):
        run["settings"] = {key: (each or {}).get(key) for key in differing}
    if as_json:
        print_json(found)
        return
    shown = sorted(filter(_SHOWN.fullmatch, names), key=lambda name: (name.startswith(("completions", "train")), name))
    shown += [name for name in metrics if name not in shown]
    rows = [
        [
            run["run"],
            *map(_text, run["settings"].values()),
            str(run["steps"]),
            *(_text(run["metrics"].get(name)) for name in shown),
        ]
        for run in found
    ]
    # Of long names each part is on a line of its own. A table that is too wide for the terminal loses nothing.
    headings = [
        Column(Text(re.sub(r"(?<=[./_])(?=\w)", "\n", one_line(name)))) for name in (*differing, "steps", *shown)
    ]
    made, out = table(("run", *headings), rows), Terminal()
    needed = out.measure(made, options=out.options.update(width=10_000)).maximum
    Terminal(width=max(out.width, needed)).print(made)


def _last_values(folder: Path) -> dict[str, Any]:
    file, metrics, steps = MetricsFile(folder / "metrics.jsonl"), dict[str, float](), 0
    while rows := file.read()[1]:
        for row in rows:
            if row.get("kind") == "step" and is_number(row.get("step")):
                steps = row["step"] + 1
            metrics |= {name: value for name, value in row.items() if "/" in name and is_number(value)}
    return {"steps": steps, "metrics": metrics}


def _settings(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a run by their keys; None if its folder does not have them."""
    path = folder / "run.toml"
    return dict(_leaves(RunFile.read(path, ()).tree)) if path.is_file() else None


def _leaves(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{key}.")
        elif not key.startswith(_NAMES):
            yield key, value


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "–"
    return f"{value:.4g}" if is_number(value) else json.dumps(value, ensure_ascii=False, default=str)
