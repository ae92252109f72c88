"""`quartet certs`, `env`: this host; `contract-test`: an implementation of a service."""

import importlib.util
import pwd
from pathlib import Path

import click
import grpc
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
from quartet_client.cli.options import json_option, print_json, table
from quartet_client.connection import ALL_KINDS
from quartet_client.errors import InputError, QuartetError
from quartet_client.launcher import the_launcher
from quartet_client.terminal import Terminal, echo
from quartet_common.config import SecuritySection, split_address, validate_section
from quartet_common.diagnosis import Peer
from quartet_common.identity import ROLES
from quartet_common.python_file import install_command
from quartet_common.run_file import RunFile

_folder = click.argument("folder", metavar="FOLDER", type=click.Path(path_type=Path, file_okay=False))
_hosts = click.option(
    "--host", "hosts", multiple=True, metavar="HOST", help="Name or IP address it answers at; repeat."
)
_days = click.option(
    "--days", type=click.IntRange(1, 825), default=CERTIFICATE_DAYS, show_default=True, help="Days of validity."
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
@click.option(
    "--ca-days", type=click.IntRange(1, 36500), default=CA_DAYS, show_default=True, help="The CA's days of validity."
)
def init(folder: Path, hosts: tuple[str, ...], days: int, ca_days: int) -> int:
    """Make a CA in FOLDER and one certificate for each role."""
    by_role = _hosts_by_role(hosts)
    create_authority(folder, ca_days)
    made = [issue(folder, role, [role], by_role[role], days) for role in ROLES]
    _show(made)
    echo(f"keep {folder} private; quartet certs export makes a service's own folder")
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
    """Renew certificates with the roles and hosts that they have. Running services reload them.

    `ca` is the CA's own certificate: for ten years, with the same key, so that what it signed stays valid.
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


_USERS = 2**32 - 1  # user ids are below this


def _user_id(owner: str | None) -> int | None:
    if owner is None or (owner.isdecimal() and int(owner) < _USERS):
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
    rows: list[list[str | Text]] = []
    for info in found:
        left = info.days_left()
        days = Text(f"{left:.0f}", "red" if left < 7 else "yellow" if left < 30 else "")
        rows.append([info.name, ", ".join(info.roles), ", ".join(info.hosts), f"{info.not_after:%Y-%m-%d %H:%M}", days])
    headings = ("certificate", "roles", "hosts", "good until", "days left")
    Terminal().print(table(headings, rows) if found else "no certificates there")


@click.group()
def env() -> None:
    """The services' environments on this machine."""


@env.command()
@click.argument("service")
@click.argument("packages", metavar="PACKAGE...", nargs=-1, required=True)
def add(service: str, packages: tuple[str, ...]) -> int:
    """Install PACKAGE... into a service's environment, and again whenever that is rebuilt.

    A PACKAGE is what pip takes: a requirement, a folder with a package, or a requirements file (*.txt).
    """
    launcher = the_launcher("install them yourself into the service's environment")
    return launcher.run_environments(service, *(f"--add={package}" for package in packages))


@env.command()
@click.argument("service")
@click.argument("packages", metavar="PACKAGE...", nargs=-1, required=True)
def remove(service: str, packages: tuple[str, ...]) -> int:
    """Remove PACKAGE... from a service's environment: each as `quartet env add` was given it, or by its name alone."""
    launcher = the_launcher("uninstall them yourself from the service's environment")
    return launcher.run_environments(service, *(f"--remove={package}" for package in packages))


_NEEDED = ("pytest", "numpy", "xxhash")


@click.command("contract-test", context_settings={"ignore_unknown_options": True})
@click.option("--service", "kind", type=click.Choice(ALL_KINDS), required=True, help="What it implements.")
@click.option("--target", "address", metavar="HOST:PORT", required=True, help="Where the implementation listens.")
@click.option("--ca", type=click.Path(path_type=Path), help="PEM of the CA, with --certificate and --key: mutual TLS.")
@click.option("--certificate", type=click.Path(path_type=Path), help="PEM certificate of the caller, role operator.")
@click.option("--key", type=click.Path(path_type=Path), help="PEM key of the certificate.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the bearer token of the calls.")
@click.option("--broker", default="", metavar="HOST:PORT", help="trainer: its broker, which gets a step to train.")
@click.option("--run", "run_id", default="contract-trained", show_default=True, help="trainer: the run that it trains.")
@click.option("--end-token", default=0, show_default=True, help="rollout: the token that ends a completion.")
@click.option("--ends", is_flag=True, help="Test last the call that ends the service (a trainer's Stop).")
@click.argument("pytest_arguments", nargs=-1, type=click.UNPROCESSED)
def contract_test(
    kind: str,
    address: str,
    ca: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
    broker: str,
    run_id: str,
    end_token: int,
    ends: bool,
    pytest_arguments: tuple[str, ...],
) -> int:
    """Test every RPC of the implementation at --target, with valid and with invalid input.

    Each failure is a line: which RPC, what was sent, what came and what the contract allows. Other arguments go to
    pytest, e.g. -k ScoreStream, --junitxml FILE, -v.

    It makes runs named case-… at a broker and deletes them; it pauses a trainer and has it save a checkpoint. Do not
    use it on a service in production. Exit status: 0 passed, 1 something failed, 2 it could not be tested.
    """
    if importlib.util.find_spec("quartet_contract") is None:
        raise InputError("contract-test needs quartet_contract: a checkout has it, pip install './client[contract]'")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"contract-test needs {', '.join(missing)}: {install_command(*missing)}")
    from quartet_contract.suite import run_suite
    from quartet_contract.target import Bench, Target
    from quartet_contract.world import NotHere

    try:
        split_address(address)
    except ValueError as error:
        raise InputError(f"--target: {error}") from None
    files = {"tls_ca": ca, "tls_certificate": certificate, "tls_key": key, "token_file": token_file}
    security = validate_section(SecuritySection, files, "security", RunFile())
    target = Target(kind, address, security, broker, run_id, end_token, ends)
    bench = Bench(target)
    try:
        answer = bench.handshake()
    except grpc.RpcError as error:
        raise QuartetError(Peer(kind, address, security).explain(error), error.code()) from error
    except NotHere as reason:
        raise InputError(f"{reason}; check --service and --target") from None
    finally:
        bench.close()
    echo(f"{kind} at {address}: build {answer.build}, contract {answer.contract.major}.{answer.contract.minor}")
    return run_suite(target, pytest_arguments)
