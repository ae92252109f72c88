"""`quartet env`: packages of users in the environments of a checkout's services."""

import click

from quartet_client.cli.options import the_launcher


@click.group()
def env() -> None:
    """The services' environments on this machine."""


@env.command()
@click.argument("service")
@click.argument("packages", metavar="PACKAGE...", nargs=-1, required=True)
def add(service: str, packages: tuple[str, ...]) -> int:
    """Install PACKAGE... into a service's environment, and again whenever that is made anew.

    A PACKAGE is what pip takes: a requirement, a folder with a package, or a requirements file (*.txt).
    """
    with the_launcher("install them yourself into the service's environment"):
        from quartet_local.checkout import run_environments
    return run_environments(service, *(f"--add={package}" for package in packages))
