"""`quartet migrate-colossalchat`: a run file from ColossalChat's command line."""

import shlex

import click

from quartet_client.cli.migrate import migrate
from quartet_common.text import visible


# Its words look like options, but they are not ours; -h is not ColossalChat's, and neither is it ours here.
@click.command(
    "migrate-colossalchat", context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]}
)
@click.argument("flags", nargs=-1, required=True, type=click.UNPROCESSED)
def migrate_colossalchat(flags: tuple[str, ...]) -> int:
    """Print the run file that does what ColossalChat's rl_example.py does with FLAGS, in one argument or as they are.

    Flags that have no counterpart are named in its comments, with the reason.
    """
    click.echo(visible(migrate(flags[0] if len(flags) == 1 else shlex.join(flags))), nl=False)
    return 0
