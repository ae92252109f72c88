"""`quartet contract-test`: whether somebody's implementation of a service does what the contract says."""

import importlib.util
from pathlib import Path

import click
import grpc

from quartet_client.errors import InputError, QuartetError
from quartet_client.terminal import echo
from quartet_common.config import SecuritySection, split_address, validate_section
from quartet_common.diagnosis import Peer
from quartet_common.plugins import install_command
from quartet_common.run_file import RunFile

_NEEDED = ("pytest", "numpy", "xxhash")


@click.command("contract-test", context_settings={"ignore_unknown_options": True})
@click.option("--service", "kind", type=click.Choice(["broker", "reward", "rollout", "trainer"]), required=True)
@click.option("--target", "address", metavar="HOST:PORT", required=True, help="Where the implementation listens.")
@click.option("--ca", type=click.Path(path_type=Path), help="PEM of the CA, with --certificate and --key: mutual TLS.")
@click.option("--certificate", type=click.Path(path_type=Path), help="PEM certificate of the caller, role operator.")
@click.option("--key", type=click.Path(path_type=Path), help="PEM key of the certificate.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the bearer token of the calls.")
@click.option("--broker", default="", metavar="HOST:PORT", help="trainer: its broker, where a step to train is put.")
@click.option("--run", "run_id", default="contract-trained", show_default=True, help="trainer: the run it is to train.")
@click.option("--end-token", default=0, show_default=True, help="rollout: the token that ends a completion.")
@click.option("--ends", is_flag=True, help="Also the call that ends the service (a trainer's Stop), after all others.")
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
    """Try every RPC of a service, with good and with bad input, on an implementation that runs at --target.

    One line a failure says which RPC, what was tried, what came and what the contract allows. What else is given goes
    to pytest, e.g. -k ScoreStream, --junitxml FILE, -v.

    It makes runs named case-… at a broker and deletes them; it pauses a trainer and has it save a checkpoint. Do not
    point it at a service that works for others. Exit status: 0 passed, 1 something failed, 2 it could not be tried.
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
        answer = bench.introduce()
    except grpc.RpcError as error:
        raise QuartetError(Peer(kind, address, security).explain(error), error.code()) from error
    except NotHere as reason:
        raise InputError(f"{reason}; check --service and --target") from None
    finally:
        bench.close()
    echo(f"{kind} at {address}: build {answer.build}, contract {answer.contract.major}.{answer.contract.minor}")
    return run_suite(target, pytest_arguments)
