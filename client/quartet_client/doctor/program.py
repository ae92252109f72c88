"""The service's own program: where it is, and what it says to its configuration."""

import ipaddress
import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quartet_client.authority import read_info
from quartet_client.doctor.findings import Finding, failure, ok, warning
from quartet_client.errors import InputError
from quartet_common.certificates import read_certificates
from quartet_common.config import ConfigError, SecuritySection, is_loopback, split_address

_PREFLIGHT_SECONDS = 120.0
# The versions that the pinned packages are made and tested for.
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
    """Return the user as whom the systemd unit runs the program; None: it is not of an installation."""
    user = f"quartet-{kind}"
    if program is None or Path("/opt/quartet") not in program.parents:
        return None
    return user if user in {each.pw_name for each in pwd.getpwall()} else None


def check_user(user: str) -> Finding | None:
    """Whether the checks can be made as the user who runs the service; None when they can."""
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
    """Whether it is there and starts."""
    if program is None:
        return failure("program", f"quartet-{kind} is not installed", f"deploy/systemd/install.sh {kind}, or make demo")
    try:
        answer = subprocess.run([str(program), "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return failure("program", f"{program} does not start: {error}", "install its environment again")
    return ok("program", f"{answer.stdout.strip()} at {program}")


def check_python(program: Path) -> Finding:
    """The Python that the service runs in: that of its environment."""
    python = program.parent / "python"
    command = [str(python), "-c", "import platform; print(platform.python_version())"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return failure("Python", f"{python} does not start: {error}", "install its environment again")
    version = answer.stdout.strip()
    if tuple(map(int, version.split(".")[:2])) not in _PYTHONS:
        tested = " and ".join(f"{major}.{minor}" for major, minor in _PYTHONS)
        return warning(
            "Python", f"{version}; packages are pinned for {tested}", "make the environment with one of them"
        )
    return ok("Python", f"{version} at {python}")


def check_sandbox(program: Path, file: Path | None, overrides: Sequence[str], user: str | None = None) -> Finding:
    """Have the reward service try its sandbox and attack it, whether its run needs it or not."""
    finding = check_preflight(program, file, [*overrides, "reward.sandbox.required=true"], user)
    if finding.state != "ok":
        return warning("sandbox", finding.what, "verifiers that run programs need it: docs/sandbox.md")
    mode = next(part for part in finding.what.split(", ") if part.startswith("sandbox "))
    return ok("sandbox", f"programs run in the mode {mode.removeprefix('sandbox ')}")


def check_preflight(program: Path, file: Path | None, overrides: Sequence[str], user: str | None = None) -> Finding:
    """Have the service, as `user`, check its configuration and what that names: keys, Redis, model, sandbox."""
    command = [str(program), *([str(file)] if file else []), "--dry-run"]
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
        # Status 2: a sentence each, which begins with the program's name; else what ended it is the last line.
        said = [line for line in lines if line.startswith(f"{program.name}: ")] if answer.returncode == 2 else []
        what = "\n".join(said or lines[-1:] or [f"exit status {answer.returncode}"])
        return failure("preflight", what, "each sentence says what is wrong and what is allowed")
    plan = json.loads(answer.stdout)
    told = [
        f"{key} {value}" for key, value in plan.items() if key in ("address", "redis", "sandbox", "engine", "model")
    ]
    return ok("preflight", ", ".join(told))


_SOON_DAYS = 14


def check_security(kind: str, address: str, bind_host: str, security: SecuritySection) -> Iterator[Finding]:
    """Whether the service may listen where it is told to, and whether its certificate will be believed."""
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
