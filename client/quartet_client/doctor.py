"""`quartet doctor`: checks whether a host is fit for a service. One function per check; findings say what to do."""

import ctypes
import ipaddress
import json
import os
import pwd
import resource
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import grpc
from quartet.v1 import common_pb2

from quartet_client.authority import read_info
from quartet_client.data import DataSection
from quartet_client.errors import InputError
from quartet_common.certificates import read_certificates
from quartet_common.channel import connect
from quartet_common.config import (
    ConfigError,
    LoadedConfig,
    SecuritySection,
    is_loopback,
    load_config,
    split_address,
)
from quartet_common.errors import describe
from quartet_common.gpus import GpuError, old_driver, read_gpus
from quartet_common.handshake import handshake

State = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    check: str
    state: State
    """`failure`: the service will not work. `warning`: it works, but may fail later."""
    what: str
    cure: str = ""
    """What to do about it; empty if `ok`."""


def ok(check: str, what: str) -> Finding:
    return Finding(check, "ok", what)


def warning(check: str, what: str, cure: str) -> Finding:
    return Finding(check, "warning", what, cure)


def failure(check: str, what: str, cure: str) -> Finding:
    return Finding(check, "failure", what, cure)


_GIB = 1 << 30
_LITTLE_DISK, _NO_DISK = 5 * _GIB, _GIB // 4
_LITTLE_SHARED = _GIB
_FILES = 4096
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized
_COMMAND_SECONDS = 90.0  # importing torch takes ten seconds of processor time, on a host that may be busy


def check_disk(folder: Path, purpose: str) -> Finding:
    """Free space where a folder is, or will be created."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if os.path.exists(parent))
    free = shutil.disk_usage(existing).free
    what = f"{free / _GIB:.1f} GiB free for {purpose} ({folder})"
    if free < _NO_DISK:
        return failure("disk", what, "free some space, or name another folder")
    if free < _LITTLE_DISK:
        return warning("disk", what, "a checkpoint is written beside the one before: have room for several")
    return ok("disk", what)


def check_shared_memory() -> Finding:
    """/dev/shm, through which engine processes and NCCL hand tensors to each other; containers give 64 MiB."""
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError:
        return warning("shared memory", "/dev/shm is not there", "mount a tmpfs there")
    what = f"/dev/shm holds {total / _GIB:.1f} GiB"
    if total < _LITTLE_SHARED:
        return warning("shared memory", what, "give the container more (--shm-size=8g), or use one process and one GPU")
    return ok("shared memory", what)


def check_open_files() -> Finding:
    """The limit of open files; each connection and each program under way takes some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        return warning("open files", f"at most {soft}", f"raise it: ulimit -n {_FILES}, or LimitNOFILE= in the unit")
    return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"at most {soft}")


def check_clock() -> Finding:
    """Clock synchronization: certificates depend on it, and logs of several hosts are merged by time."""
    timex = ctypes.create_string_buffer(512)  # modes 0: only read
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        return warning("clock", "its synchronization cannot be read", "check that NTP runs")
    if state in (-1, _TIME_ERROR):
        return warning("clock", "not synchronized", "run NTP (chrony, systemd-timesyncd)")
    return ok("clock", "synchronized")


def check_gpus(python: Path | None, other: Path | None) -> Iterator[Finding]:
    """The GPUs and their driver, whether torch can use them, and whether trainer and rollout have one NCCL.

    Args:
        python: the service's interpreter.
        other: the trainer's, if the service is a rollout, and the reverse; None: it is not on this host.
    """
    try:
        gpus = read_gpus()
    except GpuError as error:
        yield failure("GPU", str(error), "name whole GPUs, as `nvidia-smi -L` lists them")
        return
    if not gpus:
        yield ok("GPU", "no NVIDIA driver answers: the service runs on the CPU")
        return
    yield ok("GPU", f"{'; '.join(map(str, gpus))}; driver {gpus[0].driver}")
    if old := old_driver(gpus):
        yield warning("driver", old, "update it, or keep the packages for the CPU (docs/gpu.md)")
    if python is None:
        return
    torch = _ask_torch(python)
    if torch is None:
        yield failure("torch", f"{python} cannot import torch", "install the service's environment again")
    elif not torch["usable"]:
        cure = f"update the driver: it is too old for CUDA {torch['cuda']}" if torch["cuda"] else _FOR_CUDA
        yield failure("torch", f"torch {torch['torch']} does not see the GPU", cure)
    else:
        yield ok("torch", f"torch {torch['torch']}, CUDA {torch['cuda']}")
        yield _check_nccl(torch, _ask_torch(other) if other else None)
        yield _check_peers(torch["apart"], len(gpus))


_FOR_CUDA = "install a CUDA build of torch: python3 deploy/local/environments.py --gpu, or install.sh --gpu"
_ASK = """
import itertools, json, torch
usable, count = torch.cuda.is_available(), torch.cuda.device_count()
pairs = itertools.permutations(range(count), 2)
print(json.dumps({
    "torch": torch.__version__, "cuda": torch.version.cuda, "usable": usable,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if usable else "",
    "apart": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
}))
"""


def _ask_torch(python: Path) -> dict[str, Any] | None:
    """Query the torch of an environment about GPUs; None if it has no torch."""
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        return json.loads(_run([str(python), "-c", _ASK]).splitlines()[-1])
    return None


def _check_nccl(own: dict[str, Any], other: dict[str, Any] | None) -> Finding:
    if other is None:
        return ok("NCCL", f"{own['nccl']}; it must be the same at the trainer and all rollouts: compare where they run")
    if own["nccl"] != other["nccl"]:
        return failure(
            "NCCL",
            f"{own['nccl']} here, {other['nccl'] or 'none'} at the other end on this host",
            "install rollout and trainer from this checkout's requirements, or use gloo",
        )
    return ok("NCCL", f"{own['nccl']}, on both ends")


def _check_peers(apart: list[tuple[int, int]], count: int) -> Finding:
    """Whether GPUs read each other's memory; where they do not, NCCL goes through the host's."""
    if apart:
        pairs = ", ".join(f"{one}-{two}" for one, two in apart if one < two or [two, one] not in apart)
        return warning("peer access", f"not between {pairs}", "`nvidia-smi topo -m` says why; it works, only slower")
    return ok("peer access", "there is one GPU" if count == 1 else "between all GPUs")


def _run(command: list[str]) -> str:
    """Return what a command prints. Raises OSError, SubprocessError."""
    answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
    return answer.stdout.strip()


_PREFLIGHT_SECONDS = 120.0
# The versions for which the packages are pinned and tested.
_PYTHONS = ((3, 11), (3, 12))


def find_program(kind: str) -> Path | None:
    """Return the service's program: of the systemd installation, of a checkout's environment, or on PATH."""
    name = f"quartet-{kind}"
    for folder in (Path("/opt/quartet") / kind / "bin", Path(".quartet/envs") / kind / "bin"):
        if (folder / name).is_file():
            return folder / name
    found = shutil.which(name)
    return Path(found) if found else None


def unit_user(kind: str, program: Path | None) -> str | None:
    """Return the user of the program's systemd unit; None if the program is not of an installation."""
    user = f"quartet-{kind}"
    if program is None or Path("/opt/quartet") not in program.parents:
        return None
    return user if user in {each.pw_name for each in pwd.getpwall()} else None


def check_user(user: str) -> Finding | None:
    """Return a finding if the checks cannot be made as the user who runs the service."""
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        return failure("user", f"there is no user {user}", "name the user who runs the service: --user")
    if os.geteuid() in (0, uid):
        return None
    return warning(
        "user", f"what {user}, who runs the service, can read was not checked", f"run it as root or as {user}"
    )


def _as_user(user: str | None) -> dict[str, Any]:
    """Arguments of `subprocess.run` to run a program as another user, if this one may."""
    if user is None or os.geteuid() != 0:
        return {}
    entry = pwd.getpwnam(user)
    groups = os.getgrouplist(user, entry.pw_gid)
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


def check_program(kind: str, program: Path | None) -> Finding:
    if program is None:
        return failure("program", f"quartet-{kind} is not installed", f"deploy/systemd/install.sh {kind}, or make demo")
    try:
        version = _run([str(program), "--version"])
    except (OSError, subprocess.SubprocessError) as error:
        return failure("program", f"{program} does not start: {error}", "install its environment again")
    return ok("program", f"{version} at {program}")


def check_python(program: Path) -> Finding:
    python = program.parent / "python"
    try:
        version = _run([str(python), "-c", "import platform; print(platform.python_version())"])
    except (OSError, subprocess.SubprocessError) as error:
        return failure("Python", f"{python} does not start: {error}", "install its environment again")
    if tuple(map(int, version.split(".")[:2])) not in _PYTHONS:
        tested = " and ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
        return warning(
            "Python", f"{version}; packages are pinned for {tested}", "make the environment with one of them"
        )
    return ok("Python", f"{version} at {python}")


def check_sandbox(program: Path, file: Path | None, overrides: Sequence[str], user: str | None = None) -> Finding:
    """Have the reward service test its sandbox, even if its run does not need it."""
    finding = check_preflight(program, file, [*overrides, "reward.sandbox.required=true"], user)
    if finding.state != "ok":
        return warning("sandbox", finding.what, "verifiers that run programs need it: docs/sandbox.md")
    mode = next(part for part in finding.what.split(", ") if part.startswith("sandbox "))
    return ok("sandbox", f"programs run in the mode {mode.removeprefix('sandbox ')}")


def check_preflight(
    program: Path, file: Path | None, overrides: Sequence[str], user: str | None = None, port: bool = False
) -> Finding:
    """Run the service's `--dry-run` as `user`: it checks its configuration, keys, Redis, model and port."""
    command = [str(program), *([str(file)] if file else []), "--dry-run", *(["--check-port"] if port else [])]
    command += [word for override in overrides for word in ("--set", override)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PREFLIGHT_SECONDS, **_as_user(user))
    except OSError as error:
        return failure(
            "preflight", f"{program} does not start as {user}: {error}", "install it where that user may run it"
        )
    except subprocess.TimeoutExpired:
        return failure("preflight", f"no answer in {_PREFLIGHT_SECONDS:.0f} s", f"run it: {' '.join(command)}")
    if answer.returncode:
        lines = answer.stderr.strip().splitlines()
        # With status 2 each problem is a line that begins with the program's name; else the last line is the error.
        said = [line for line in lines if line.startswith(f"{program.name}: ")] if answer.returncode == 2 else []
        what = "\n".join(said or lines[-1:] or [f"exit status {answer.returncode}"])
        return failure("preflight", what, "each sentence says what is wrong and what is allowed")
    plan = json.loads(answer.stdout)
    facts = [
        f"{key} {value}" for key, value in plan.items() if key in ("address", "redis", "sandbox", "engine", "model")
    ]
    return ok("preflight", ", ".join(facts))


_SOON_DAYS = 14


def check_security(kind: str, address: str, bind_host: str, security: SecuritySection) -> Iterator[Finding]:
    """The address that the service listens on, and its certificate."""
    host = split_address(address)[0]
    listens = bind_host or host
    if not security.tls:
        if is_loopback(listens):
            yield ok("security", f"plaintext on {listens}, which only this host reaches")
        elif security.insecure:
            yield warning("security", f"plaintext on {listens}, open to its network", "use TLS: quartet certs init")
        else:
            yield failure("security", f"plaintext on {listens}, which is not loopback", "use TLS: quartet certs init")
        return
    try:
        read_certificates(security)
        yield from _check_certificate(kind, host, security)
    except (ConfigError, InputError) as error:
        yield failure("certificate", str(error), "make it again: quartet certs issue")


def _check_certificate(kind: str, host: str, security: SecuritySection) -> Iterator[Finding]:
    info = read_info(Path(str(security.tls_certificate)))
    left = info.days_left()
    renew = f"quartet certs renew FOLDER {info.name}"
    if left < 0:
        yield failure("certificate", f"it expired {-left:.0f} days ago", renew)
    elif left < _SOON_DAYS:
        yield warning("certificate", f"it expires in {left:.0f} days", renew)
    else:
        yield ok("certificate", f"good for {left:.0f} days")
    if security.roles and kind not in info.roles:
        roles = ", ".join(info.roles) or "none"
        yield failure("role", f"the certificate's roles are {roles}", f"issue one with --role {kind}")
    elif security.roles and kind not in info.server_roles:
        yield warning("role", "no caller can check it: no name of the certificate says it", renew)
    if not _names(info.hosts, host):
        yield failure(
            "host name",
            f"the certificate is for {', '.join(info.hosts)}, and others call {host}",
            f"issue it with --host {host}",
        )


def _names(hosts: tuple[str, ...], host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        wildcard = "*." + host.partition(".")[2]
        return host in hosts or wildcard in hosts
    return str(address) in hosts


_NEEDS = {"broker": (), "reward": (), "rollout": ("broker", "reward"), "trainer": ("broker",)}
_PEER_SECONDS = 5.0


async def examine(
    kind: str,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    running: bool = False,
    user: str | None = None,
) -> AsyncIterator[Finding]:
    """Check this host for a service.

    Args:
        kind: the service.
        file: its run file.
        overrides: KEY=VALUE, as its own `--set`.
        running: the service runs already, so its port is in use.
        user: who runs it; None: the user of its systemd unit if there is one, else the current user.

    Raises:
        ConfigError: the run file cannot be used at all.
    """
    config: LoadedConfig[DataSection] = load_config("data", DataSection, file, overrides)
    found = find_program(kind)
    yield check_program(kind, found)
    if found is not None:
        yield check_python(found)
        user = user or unit_user(kind, found)
        unchecked = check_user(user) if user else None
        if unchecked is not None:
            yield unchecked
            user = None
        preflight = check_preflight(found, file, overrides, user, port=not running)
        yield preflight
        if kind == "reward" and preflight.state == "ok":
            yield check_sandbox(found, file, overrides, user)
    address = getattr(config.addresses, kind)
    for finding in check_security(kind, address, config.server.bind_host, config.security):
        yield finding
    if kind == "trainer":
        yield check_disk(config.run.path, "checkpoints and metrics")
    else:
        yield check_disk(Path("/tmp"), "temporary files")
    if kind in ("rollout", "trainer"):
        yield check_shared_memory()
        other = find_program("trainer" if kind == "rollout" else "rollout")
        pythons = (each.parent / "python" if each else None for each in (found, other))
        for finding in check_gpus(*pythons):
            yield finding
    yield check_open_files()
    yield check_clock()
    for peer in _NEEDS[kind]:
        yield await _check_peer(peer, config)


async def _check_peer(peer: str, config: LoadedConfig[DataSection]) -> Finding:
    address = getattr(config.addresses, peer)
    async with connect(address, config.security, service=peer) as channel:
        try:
            answer = await handshake(channel, common_pb2.SERVICE_KIND_CLIENT, timeout=_PEER_SECONDS)
        except grpc.aio.AioRpcError as error:
            cure = f"start the {peer}, or correct addresses.{peer}; look for a firewall between the hosts"
            return failure(peer, f"{address}: {describe(error)}", cure)
    waits = f", waits for {', '.join(answer.waiting_for)}" if answer.waiting_for else ""
    return ok(peer, f"{answer.instance_id} answers at {address}{waits}")
