"""`quartet plot`: the learning curves of runs, as a PNG."""

from pathlib import Path

import click

from quartet_client.cli.plot import plot_runs
from quartet_client.errors import InputError
from quartet_client.terminal import echo
from quartet_common.plugins import install_command


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
