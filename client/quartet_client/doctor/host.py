"""What a service asks of its host: ports, disk, memory, open files, clock, sandbox, GPU."""

import ctypes
import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quartet_client.doctor.findings import Finding, failure, ok, warning
from quartet_common.config import ConfigError, ServerSection, split_address
from quartet_common.gpus import GpuError, old_driver, read_gpus
from quartet_common.ports import check_ports_free

_GIB = 1 << 30
_LITTLE_DISK, _NO_DISK = 5 * _GIB, _GIB // 4
_LITTLE_SHARED = _GIB
_FILES = 4096
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_COMMAND_SECONDS = 90.0  # importing torch takes ten seconds of processor time, on a host that may be busy
# (sysctl, value that forbids, what it forbids)
_FORBID_NAMESPACES = (
    ("kernel/unprivileged_userns_clone", "0"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1"),
    ("user/max_user_namespaces", "0"),
)


def check_ports(kind: str, address: str, server: ServerSection) -> Finding:
    """Whether the service can listen where it is told to, and beside it for its metrics."""
    host, port = split_address(address)
    try:
        check_ports_free(kind, address, server)
    except ConfigError as error:
        return failure("ports", str(error), "`ss -ltnp` tells who listens there; --running if it is the service itself")
    metrics = f" and {port + server.metrics_port_offset}" if server.metrics and port else ""
    return ok("ports", f"{port}{metrics} on {server.bind_host or host}" if port else "any free one")


def check_disk(folder: Path, purpose: str) -> Finding:
    """Free space where a folder is, or will be made."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
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
    """Certificates and leases are compared with it, logs of several hosts put side by side."""
    timex = ctypes.create_string_buffer(512)  # modes 0: only read
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        return warning("clock", "it cannot be told whether it is synchronised", "see that NTP runs")
    if state in (-1, _TIME_ERROR):
        return warning("clock", "the kernel does not know it as synchronised", "run NTP (chrony, systemd-timesyncd)")
    return ok("clock", "synchronised")


def check_namespaces() -> Finding:
    """Whether an ordinary user may make the namespaces of the sandbox's strong mode."""
    if os.geteuid() == 0:
        return ok("namespaces", "the service would run as root, which may make them")
    for name, forbids in _FORBID_NAMESPACES:
        path = Path("/proc/sys") / name
        if path.exists() and path.read_text().strip() == forbids:
            key = name.replace("/", ".")
            return warning(
                "namespaces",
                f"{key} is {forbids}: programs run in a weaker mode",
                "allow user namespaces for the service, or run it as root (docs/sandbox.md)",
            )
    return ok("namespaces", "an ordinary user may make them")


def check_gpus(python: Path | None, other: Path | None) -> Iterator[Finding]:
    """The GPUs and their driver, whether torch can use them, and whether trainer and rollout have one NCCL.

    Args:
        python: the service's interpreter.
        other: that of the trainer, for a rollout, and the reverse; None: it is not on this host.
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
    """Return what an environment's torch says of GPUs; None if it has none."""
    answer = _run([str(python), "-c", _ASK])
    return json.loads(answer.splitlines()[-1]) if answer else None


def _check_nccl(own: dict[str, Any], other: dict[str, Any] | None) -> Finding:
    if other is None:
        return ok("NCCL", f"{own['nccl']}; the trainer's and all rollouts' must be one: compare where they run")
    if own["nccl"] != other["nccl"]:
        return failure(
            "NCCL",
            f"{own['nccl']} here, {other['nccl'] or 'none'} at the other end on this host",
            "make rollout and trainer from this checkout's closures, or use gloo",
        )
    return ok("NCCL", f"{own['nccl']}, on both ends")


def _check_peers(apart: list[tuple[int, int]], count: int) -> Finding:
    """Whether GPUs read each other's memory; where they do not, NCCL goes through the host's."""
    if apart:
        pairs = ", ".join(f"{one}-{two}" for one, two in apart if one < two or [two, one] not in apart)
        return warning("peer access", f"not between {pairs}", "`nvidia-smi topo -m` says why; it works, only slower")
    return ok("peer access", "there is one GPU" if count == 1 else "between all GPUs")


def _run(command: list[str]) -> str | None:
    """Return what a command prints, or None if it cannot be run, fails, or takes too long."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
