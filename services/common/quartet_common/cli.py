"""The command line of all four services: options, exit codes, and standard error as JSON lines."""

import argparse
import asyncio
import dataclasses
import faulthandler
import fcntl
import json
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from quartet_common import __version__, metrics, tracing
from quartet_common.config import ConfigError, LoadedConfig, Section, load_config
from quartet_common.hub import located
from quartet_common.log import configure_logging, get_logger
from quartet_common.ports import check_ports_free
from quartet_common.process import Supervisor, keep_freed_memory
from quartet_common.run_file import Problems
from quartet_common.text import Repeats, one_line

log = get_logger(__name__)

_FAILED = metrics.counter(
    "quartet_tls_handshakes_failed_total",
    "TLS handshakes that failed, by which end this process was and why (no_certificate, certificate, not_tls, "
    "other); with --log-format json",
    ["side", "reason"],
)
# Large enough that a library which writes much at once, while it holds the GIL, does not block.
_PIPE_BYTES = 1 << 20
_READER_SECONDS = 2.0
_CAUSES = (
    ("no_certificate", re.compile("PEER_DID_NOT_RETURN_A_CERTIFICATE")),
    ("not_tls", re.compile("WRONG_VERSION_NUMBER|HTTP_REQUEST|UNSUPPORTED_PROTOCOL")),
    ("certificate", re.compile("certificate|Verification|BAD_SIGNATURE|UNKNOWN_CA", re.IGNORECASE)),
)


@contextmanager
def watched_stderr(service: str, instance: str) -> Iterator[None]:
    """Pipe standard error through `stderr_reader.py`; logs go to the original standard error directly."""
    read, write = os.pipe()
    with suppress(OSError):  # the user's limit on pipe buffers is reached
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    original = os.dup(2)
    reader = str(Path(__file__).with_name("stderr_reader.py"))
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", reader, service, instance],
        stdin=read,
        stdout=subprocess.PIPE,
        stderr=original,
        text=True,
        start_new_session=True,  # it ends after its last writer, not by a signal to the process group
    )
    os.close(read)
    os.dup2(write, 2)
    os.close(write)
    direct = os.fdopen(original, "w", buffering=1, errors="backslashreplace")
    handlers = [each for each in logging.getLogger().handlers if isinstance(each, logging.StreamHandler)]
    for handler in handlers:
        handler.setStream(direct)
    if process.stdout is not None:
        threading.Thread(target=_count_failures, args=(process.stdout,), name="handshakes", daemon=True).start()
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(original, 2)
        for handler in handlers:
            handler.setStream(sys.stderr)
        # The reader lives on as long as a child process can write to it.
        with suppress(subprocess.TimeoutExpired):
            process.wait(_READER_SECONDS)


def _count_failures(lines: IO[str]) -> None:
    repeats = Repeats()
    for line in lines:
        failed = json.loads(line)
        cause = next((name for name, pattern in _CAUSES if pattern.search(failed["reason"])), "other")
        _FAILED.labels(failed["side"], cause).inc()
        host = failed["peer"].rpartition(":")[0]
        if (repeated := repeats.count((failed["side"], host, cause))) is not None:
            extra = {**failed, "cause": cause, "repeated": repeated}
            log.warning("TLS handshake failed: %s", failed["reason"], extra=extra)


if TYPE_CHECKING:
    from quartet_common.host import ServiceHost

# For watched_stderr. gRPC reads it when it is imported, which services do before they call service_main.
if "--log-format json" in " ".join(sys.argv).replace("=", " "):
    os.environ["GRPC_TRACE"] = ",".join(filter(None, (os.environ.get("GRPC_TRACE"), "handshaker")))

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
) -> int:
    """Run a service from its command line and return its exit status.

    0: ended as asked; 1: failed, or its address is in use or not of this host; 2: invalid configuration (a sentence for
    each problem on standard error), with --dry-run --check-port also such an address; 130: Ctrl-C.

    Args:
        kind: "broker", "reward", "rollout" or "trainer".
        section: the model of its section of the run file.
        preflight: quick checks of what the configuration names; raises ConfigError; returns what --dry-run prints.
        serve: adds servicers to the host and awaits `host.run()`.
        loop_factory: makes the event loop; None: asyncio's own.
    """
    arguments = _parser(kind).parse_args(argv)
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
        plan = _check(kind, config, preflight, ports=arguments.check_port and arguments.dry_run)
        if arguments.dry_run:
            print(json.dumps({**plan, "section": config.section.model_dump(mode="json")}, indent=2, default=str))
            return 0
        check_ports_free(kind, getattr(config.addresses, kind), config.server)
        # The trainer's other ranks only follow rank 0: they have nothing to trace.
        if os.environ.get("RANK", "0") == "0":
            tracing.configure(kind, instance, config.tracing)
        watched = watched_stderr(kind, instance) if arguments.log_format == "json" else nullcontext()
        with watched, asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(_serve(kind, config, serve))
    except ConfigError as error:
        Supervisor().notify(STATUS=error.problems[0])
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


def _check(kind: str, config: LoadedConfig, preflight: Preflight, ports: bool) -> dict[str, Any]:
    """Return what would run. Raises ConfigError with all problems."""
    plan = {"service": kind, "address": getattr(config.addresses, kind), "run": config.run.id}
    with Problems() as problems:
        if config.security.tls:
            from quartet_common.certificates import check_service_files  # it imports grpc

            with problems.collecting():
                check_service_files(config.security)
        with problems.collecting():
            plan |= preflight(config)
        if ports:
            with problems.collecting():
                check_ports_free(kind, getattr(config.addresses, kind), config.server)
    return plan


def _nothing_more(config: LoadedConfig) -> dict[str, Any]:
    return {}


async def _serve(kind: str, config: LoadedConfig, serve: Serve) -> int:
    from quartet_common.host import ServiceHost  # it imports grpc, which --dry-run does not need

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
    parser.add_argument("--log-format", choices=("json", "text"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument("--version", action="version", version=f"quartet-{kind} {__version__}")
    return parser
