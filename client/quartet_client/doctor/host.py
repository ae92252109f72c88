"""What a service asks of its host: ports, disk, memory, open files, clock, sandbox, GPU."""

import ctypes
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from quartet_client.doctor.findings import Finding, failure, ok, warning
from quartet_common.cli import check_ports_free
from quartet_common.config import ConfigError, ServerSection, split_address

_GIB = 1 << 30
_LITTLE_DISK, _NO_DISK = 5 * _GIB, _GIB // 4
_LITTLE_SHARED = _GIB
_FILES = 4096
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_COMMAND_SECONDS = 20.0
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


def check_gpu(python: Path | None) -> Iterator[Finding]:
    """The driver's GPUs, and whether the service's torch can use them."""
    driver = _driver()
    if driver is None:
        yield ok("GPU", "no NVIDIA driver answers: the service runs on the CPU")
        return
    yield ok("GPU", driver)
    if python is None:
        return
    code = (
        "import torch; c = torch.cuda.is_available(); "
        "print(torch.__version__, torch.version.cuda, c, '.'.join(map(str, torch.cuda.nccl.version())) if c else '')"
    )
    answer = _run([str(python), "-c", code])
    if answer is None:
        yield failure("torch", f"{python} cannot import torch", "install the service's environment again")
        return
    version, cuda, usable, *nccl = answer.split()
    if usable != "True":
        cure = (
            "install a CUDA build of torch" if cuda == "None" else f"update the driver: it is too old for CUDA {cuda}"
        )
        yield failure("torch", f"torch {version} does not see the GPU", cure)
    else:
        yield ok("torch", f"torch {version}, CUDA {cuda}, NCCL {' '.join(nccl)} (the same on trainer and rollouts)")


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return "; ".join(answer.splitlines()) if (answer := _run(query)) else None


def _run(command: list[str]) -> str | None:
    """Return what a command prints, or None if it cannot be run, fails, or takes too long."""
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
