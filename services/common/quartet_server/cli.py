"""The command line of all services: options, checks, exit codes."""

import argparse
import asyncio
import dataclasses
import faulthandler
import json
import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quartet_common import tracing
from quartet_common.build import read_build
from quartet_common.config import ConfigError, LoadedConfig, is_loopback, load_config, split_address
from quartet_common.disk import warn_of_open_secret
from quartet_common.hub import located
from quartet_common.log import collected_warnings, configure_logging, get_logger
from quartet_common.ports import check_ports
from quartet_common.run_file import Problems
from quartet_common.sections import Section
from quartet_common.text import one_line
from quartet_server.process import SystemdNotifier, keep_freed_memory

log = get_logger(__name__)

if TYPE_CHECKING:
    from quartet_server.host import ServiceHost

_LEADS = os.environ.get("RANK", "0") == "0"
"""False in a trainer's other ranks, which serve nothing and have nothing to trace."""

_END_SECONDS = 30.0  # from the last drain to the end of the process, which is ended then with status 1
Preflight = Callable[[LoadedConfig], dict[str, Any]]
Serve = Callable[[LoadedConfig, "ServiceHost"], Awaitable[None]]


def service_main(
    kind: str,
    section: type[Section],
    preflight: Preflight,
    serve: Serve,
    argv: list[str] | None = None,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    sft: tuple[Preflight, Serve] | None = None,
    prepare: Callable[[LoadedConfig], None] | None = None,
) -> int:
    """Run a service from its command line and return its exit status.

    0: ended as asked; 1: failed, or its address is in use or not of this host; 2: invalid configuration (a sentence for
    each problem on standard error), with --dry-run --check-port also such an address; 130: Ctrl-C.

    Args:
        kind: "broker", "reward", "rollout", "environment" or "trainer".
        section: the model of its section of the run file.
        preflight: quick checks of what the configuration names; raises ConfigError; returns what --dry-run prints.
        serve: adds servicers to the host and awaits `host.run()`.
        loop_factory: makes the event loop; None: asyncio's own.
        sft: the trainer's checks and service with --sft.
        prepare: called before the process starts its first thread.
    """
    arguments = _parser(kind).parse_args(argv)
    if sft and arguments.sft:
        preflight, serve = sft
    keep_freed_memory()
    faulthandler.enable(file=2)  # systemd and the launcher send SIGABRT to a service that hangs: it says where
    instance = f"{socket.gethostname()}-{os.getpid()}"
    try:
        config = load_config(kind, section, arguments.file, arguments.set)
        config = dataclasses.replace(config, dry_run=arguments.dry_run)
        # Brokers and reward services serve several runs.
        run = config.run.id if kind in ("rollout", "trainer") else ""
        configure_logging(kind, instance, arguments.log_format, arguments.log_level, run)
        if arguments.section_only:
            preflight = _nothing_more
        if kind in ("rollout", "trainer"):
            config = located(config, weights=not arguments.dry_run)
        plan = _check(kind, config, preflight, bind=arguments.check_port and arguments.dry_run)
        if arguments.dry_run:
            print(json.dumps({**plan, "section": config.section.model_dump(mode="json")}, indent=2, default=str))
            return 0
        check_ports(kind, getattr(config.addresses, kind), config.server)
        if prepare is not None:
            prepare(config)
        if _LEADS:
            tracing.configure(kind, instance, config.tracing)
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_serve(kind, config, serve))
    except ConfigError as error:
        SystemdNotifier().notify(STATUS=error.problems[0])
        if arguments.log_format == "json":
            configure_logging(kind, instance, arguments.log_format)
        for problem in error.problems:
            if arguments.log_format == "json":
                log.error("%s", problem)
            else:
                print(one_line(f"quartet-{kind}: {problem}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:
        log.exception("the service failed")
        return 1
    finally:
        tracing.shutdown()
        faulthandler.cancel_dump_traceback_later()


def _check(kind: str, config: LoadedConfig, preflight: Preflight, bind: bool) -> dict[str, Any]:
    """Return what would run, with all warnings. Raises ConfigError with all problems."""
    address, security, server = getattr(config.addresses, kind), config.security, config.server
    plan = {"service": kind, "address": address, "run": config.run.id}
    with collected_warnings() as warnings, Problems() as problems:
        with problems.collecting():
            if security.token() and security.token_file:
                warn_of_open_secret("security.token_file", security.token_file)
        with problems.collecting():
            security.check_listening(kind, server.bind_host or split_address(address)[0])
        if security.tls:
            from quartet_common.certificates import check_service_files  # it imports grpc

            with problems.collecting():
                check_service_files(security, kind, _called_host(config, address))
        if _LEADS:
            with problems.collecting():
                tracing.check(config.tracing, connect=config.dry_run)
        with problems.collecting():
            plan |= preflight(config)
        with problems.collecting():
            check_ports(kind, address, server, bind)
    return {**plan, "warnings": warnings}


def _called_host(config: LoadedConfig, address: str) -> str:
    """Return the host by which others call the service; "" if its run file does not say it."""
    host, _ = split_address(getattr(config.section, "advertise_address", "") or address)
    only_here = is_loopback(host) and not is_loopback(config.server.bind_host or host)
    return "" if only_here or host in ("0.0.0.0", "::") or not _LEADS else host


def _nothing_more(config: LoadedConfig) -> dict[str, Any]:
    return {}


async def _serve(kind: str, config: LoadedConfig, serve: Serve) -> int:
    from quartet_server.host import ServiceHost  # it imports grpc, which --dry-run does not need

    host = ServiceHost(kind, getattr(config.addresses, kind), config.security, config.server)
    await serve(config, host)
    # asyncio waits for every task that is left, and a plug-in's may ignore its cancellation.
    faulthandler.dump_traceback_later(_END_SECONDS, exit=True, file=2)
    return host.exit_code


def _parser(kind: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"quartet-{kind}", description=f"Quartet's {kind} service.")
    parser.add_argument("file", nargs="?", type=Path, help="the run file (TOML); without it, the defaults")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key, e.g. run.id=second"
    )
    parser.add_argument("--dry-run", action="store_true", help="check the configuration, print what would run, exit")
    parser.add_argument("--check-port", action="store_true", help="with --dry-run: also check that the port is free")
    parser.add_argument(
        "--section-only", action="store_true", help="check the configuration alone, not what it names: no Redis yet"
    )
    if kind == "trainer":
        parser.add_argument("--sft", action="store_true", help="supervised fine-tuning by [sft]: no broker, no rollout")
    parser.add_argument("--log-format", choices=("json", "text"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--version", action="version", version=f"quartet-{kind} {read_build()}")
    return parser
