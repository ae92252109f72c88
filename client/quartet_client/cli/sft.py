"""`quartet sft`: supervised fine-tuning on this machine."""

from pathlib import Path

import click

from quartet_client.cli.options import print_json
from quartet_client.launcher import the_launcher
from quartet_client.terminal import echo


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
@click.option("--dry-run", is_flag=True, help="Check everything and read all rows, print what would run, and stop.")
def sft(file: Path, overrides: tuple[str, ...], dry_run: bool) -> int:
    """Fine-tune the model of FILE.toml on the rows of its section [sft], with the trainer alone.

    Ctrl-C ends it after a checkpoint; the same command goes on from there. The model is in the run's folder at the end.
    """
    launcher = the_launcher("start quartet-trainer FILE --sft yourself")
    if not dry_run:
        return launcher.sft(file, overrides)

    def warn(line: str) -> None:
        if line.startswith("warning: "):
            echo(line, err=True)

    print_json(launcher.check_sft(file, overrides, warn))
    return 0
