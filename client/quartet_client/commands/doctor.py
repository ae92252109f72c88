"""`quartet doctor`: is this host fit for a service?"""

from pathlib import Path

import click
from rich.text import Text

from quartet_client.cli.options import asynchronous, json_option
from quartet_client.cli.output import console, print_json
from quartet_client.doctor import SERVICES, Finding, examine
from quartet_common.text import one_line

# A sign besides the colour: not everyone sees the one, not every terminal shows it.
_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "failure": ("✗", "red")}


@click.command()
@click.argument("service", type=click.Choice(SERVICES))
@click.argument("file", required=False, type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the run file.")
@click.option("--running", is_flag=True, help="The service runs already: do not say that its port is taken.")
@click.option("--user", metavar="NAME", help="Who runs it. Default: the systemd unit's user, where there is one.")
@json_option
@asynchronous
async def doctor(
    service: str, file: Path | None, overrides: tuple[str, ...], running: bool, user: str | None, as_json: bool
) -> int:
    """Look at this host as the place of SERVICE with the run file FILE. Exits with 1 when it will not work."""
    found = []
    async for finding in examine(service, file, overrides, running, user):
        found.append(finding)
        if not as_json:
            console().print(_line(finding))
    if as_json:
        print_json(found)
    return int(any(finding.state == "failure" for finding in found))


def _line(finding: Finding) -> Text:
    sign, style = _SIGNS[finding.state]
    line = Text(f"{sign} {finding.check:<13} ", style)
    line.append(one_line(finding.what), "")
    if finding.cure:
        line.append(f"\n  {'':<13} → {one_line(finding.cure)}", "dim")
    return line
