"""`quartet certs`: certificates for mutual TLS between the services."""

import pwd
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from quartet_client.authority import (
    CA_DAYS,
    CERTIFICATE_DAYS,
    CertificateInfo,
    create_authority,
    export,
    issue,
    read_info,
    renew_authority,
)
from quartet_client.cli.options import json_option
from quartet_client.cli.output import console, print_json
from quartet_client.errors import InputError
from quartet_client.terminal import echo
from quartet_common.roles import ROLES

_folder = click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path, file_okay=False))
_hosts = click.option(
    "--host", "hosts", multiple=True, metavar="HOST", help="Name or IP address it answers at; repeat."
)
_days = click.option(
    "--days", type=click.IntRange(1, 825), default=CERTIFICATE_DAYS, show_default=True, help="Days it is good for."
)


@click.group()
def certs() -> None:
    """Make a CA, and certificates for services and clients."""


@certs.command()
@_folder
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="[ROLE=]HOST[,HOST...]",
    help="Names and IP addresses that ROLE answers at; without ROLE, all of them; repeat.",
)
@_days
@click.option("--ca-days", type=click.IntRange(1, 36500), default=CA_DAYS, show_default=True, help="Days the CA lives.")
def init(folder: Path, hosts: tuple[str, ...], days: int, ca_days: int) -> int:
    """Make a CA in FOLDER and one certificate for each role."""
    by_role = _hosts_by_role(hosts)
    create_authority(folder, ca_days)
    made = [issue(folder, role, [role], by_role[role], days) for role in ROLES]
    _show(made)
    echo(f"keep {folder} to yourself; quartet certs export makes a service's own folder")
    return 0


def _hosts_by_role(given: tuple[str, ...]) -> dict[str, list[str]]:
    """Read `--host`: "gpu7" is every role's, "rollout=gpu7,gpu8" are the rollout's."""
    found: dict[str, list[str]] = {role: [] for role in ROLES}
    for text in given:
        role, separator, hosts = text.rpartition("=")
        if separator and role not in ROLES:
            raise InputError(f"host is '{text}': '{role}' is no role; allowed: {', '.join(ROLES)}")
        for each in [role] if separator else ROLES:
            found[each] += hosts.split(",")
    return found


@certs.command("issue")
@_folder
@click.argument("name")
@click.option("--role", "roles", multiple=True, required=True, type=click.Choice(ROLES), help="What it may do; repeat.")
@_hosts
@_days
def issue_command(folder: Path, name: str, roles: tuple[str, ...], hosts: tuple[str, ...], days: int) -> int:
    """Sign the certificate NAME with the CA in FOLDER. One of that name is replaced."""
    _show([issue(folder, name, roles, hosts, days)])
    return 0


@certs.command()
@_folder
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@_days
def renew(folder: Path, names: tuple[str, ...], days: int) -> int:
    """Sign certificates anew, with the roles and hosts they have. Running services take them up by themselves.

    `ca` is the CA's own certificate: its key stays, and what it signed stays good.
    """
    found = [(name, read_info(folder / f"{name}.pem")) for name in names if name != "ca"]
    made = [issue(folder, name, info.roles, info.hosts, days) for name, info in found]
    if "ca" in names:
        made.append(renew_authority(folder))
    _show(made)
    return 0


@certs.command("export")
@click.argument("name", metavar="SERVICE")
@_folder
@click.option(
    "--from",
    "pki",
    default="pki",
    show_default=True,
    metavar="PKI",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of certs init.",
)
@click.option("--owner", metavar="USER", help="User (name or number) who will read them. Default: you.")
def export_command(name: str, folder: Path, pki: Path, owner: str | None) -> int:
    """Write what SERVICE (a certificate's name) needs into FOLDER: ca.crt, and its own tls.crt and tls.key."""
    for file in export(pki, name, folder, _user_id(owner)):
        echo(str(file))
    return 0


def _user_id(owner: str | None) -> int | None:
    if owner is None or owner.isdecimal():
        return None if owner is None else int(owner)
    try:
        return pwd.getpwnam(owner).pw_uid
    except KeyError:
        raise InputError(f"owner is '{owner}'; allowed: a user of this host, or a user's number") from None


@certs.command()
@_folder
@json_option
def show(folder: Path, as_json: bool) -> int:
    """List the certificates in FOLDER. Exits with 1 when one has expired."""
    files = sorted(file for file in folder.glob("*.pem") if not file.name.endswith("-key.pem"))
    found = [read_info(file) for file in files]
    if as_json:
        print_json(found)
    else:
        _show(found)
    return int(any(info.days_left() < 0 for info in found))


def _show(found: list[CertificateInfo]) -> None:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("certificate", "roles", "hosts", "good until", "days left"):
        table.add_column(heading)
    for info in found:
        left = info.days_left()
        style = "red" if left < 7 else "yellow" if left < 30 else ""
        until = f"{info.not_after:%Y-%m-%d %H:%M}"
        table.add_row(
            info.name,
            ", ".join(info.roles),
            ", ".join(info.hosts),
            until,
            Text(f"{left:.0f}", style),
        )
    console().print(table if found else "no certificates there")
