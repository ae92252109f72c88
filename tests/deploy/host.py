"""A host of its own for install.sh, and a stand-in for the systemd on it.

The host is a mount namespace with private /etc, /opt, /var and /run, which starts with this machine's content and is
gone with `close`. On its PATH is a `systemctl` that this process answers: it starts a unit's command line as the unit's
user, with its environment file, until READY=1, and stops it by SIGTERM, with SIGKILL after TimeoutStopSec.
"""

import json
import os
import re
import shlex
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "preloaded"))
from started import Started  # noqa: E402 (beside the other suites' tests)

_SECONDS = 600.0  # timeout of an installation
_HOST = """
set -e
[ "$1" = disk ] || mount -t tmpfs none "$0"
for name in etc opt var; do
    mkdir "$0/$name" "$0/$name.work"
    mount -t overlay none -o "lowerdir=/$name,upperdir=$0/$name,workdir=$0/$name.work" "/$name"
done
mount -t tmpfs none /run
mkdir -p /run/systemd/system
sed -i /^quartet-/d /etc/passwd /etc/group /etc/shadow /etc/gshadow
echo made
exec cat
"""
_SYSTEMCTL = """#!{python} -IS
import json, socket, sys
with socket.socket(socket.AF_UNIX) as manager:
    manager.connect({address!r})
    manager.sendall(json.dumps(sys.argv[1:]).encode() + b"\\n")
    status, text = json.loads(manager.makefile().readline())
print(text, end="", file=sys.stderr)
sys.exit(status)
"""


def why_not() -> str:
    """Return why there can be no such host here; empty if there can."""
    if os.geteuid() != 0:
        return "the installer makes users: it needs root"
    probe = 'mount -t tmpfs none /run && mkdir /run/u /run/w && mount -t overlay none -o "$0" /opt'
    options = "lowerdir=/opt,upperdir=/run/u,workdir=/run/w"
    done = subprocess.run([*_unshare(), "sh", "-c", probe, options], capture_output=True, text=True, timeout=20)
    return done.stderr.strip() if done.returncode else ""


class Host:
    """The host. `folder` must exist and be empty; `disk`: what it writes is there, not in memory.

    `users`: the first of a hundred user ids that install.sh may give. Hosts that are there at the same time need their
    own, as one cannot remove a user whose id a process of another host has.

    Attributes:
        processes: the running services by name; a caller may share the dictionary.
        ended: the exit status of each service that was stopped.
        drained: seconds of each stop, by service.
        away: seconds between the stop and READY=1 of each restart, by service.
    """

    def __init__(self, folder: Path, processes: dict[str, Started] | None = None, disk: bool = False, users: int = 700):
        self.folder = folder
        self.processes: dict[str, Started] = {} if processes is None else processes
        self.ended: list[tuple[str, int]] = []
        self.drained: dict[str, list[float]] = defaultdict(list)
        self.away: dict[str, list[float]] = defaultdict(list)
        self._units: dict[str, dict[str, list[str]]] = {}
        self._own = folder / "own"
        self._own.mkdir()
        command = [*_unshare(), "sh", "-c", _HOST, self._own, "disk" if disk else "memory"]
        self._holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout.readline() == "made\n"
        with self.path("/etc/login.defs").open("a") as settings:
            for kind in ("UID", "GID"):
                settings.write(f"SYS_{kind}_MIN {users}\nSYS_{kind}_MAX {users + 99}\n")
        self._server = socketserver.UnixStreamServer(str(folder / "systemd"), self._handler())
        systemctl = folder / "bin" / "systemctl"
        systemctl.parent.mkdir()
        systemctl.write_text(_SYSTEMCTL.format(python=sys.executable, address=self._server.server_address))
        systemctl.chmod(0o755)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Kill its services, and remove it."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        for process in self.processes.values():
            process.close()
        self._holder.communicate(timeout=10)

    def path(self, name: str) -> Path:
        """Return where a path of the host is seen from here. Do not follow absolute links there: `target` does."""
        return Path(f"/proc/{self._holder.pid}/root{name}")

    def written(self) -> set[str]:
        """Return the paths that the host has and this machine lacks, except user management's own backups."""
        folders = [str(self._own / name) for name in ("etc", "opt", "var")]
        lines = self.run("find", *folders, "-not", "-name", "*-").stdout.splitlines()
        return {name for line in lines if not os.path.lexists(name := line.removeprefix(str(self._own)))}

    def release(self, service: str, link: str = "/opt/quartet/{}") -> str:
        """Return the name of a service's current release; empty: there is none."""
        path = self.path(link.format(service))
        return os.readlink(path) if path.is_symlink() else ""

    def command(self, *words: object) -> list[str]:
        """Return the command line that runs a program on the host, in the same process."""
        return ["nsenter", f"--mount=/proc/{self._holder.pid}/ns/mnt", *map(str, words)]

    def run(self, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a program on the host, with more environment variables; an empty one is unset."""
        wanted = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", **variables}
        environment = {name: value for name, value in wanted.items() if value}
        return subprocess.run(
            self.command(*words), env=environment, capture_output=True, text=True, timeout=_SECONDS, umask=0o077
        )

    def give_tools(self) -> None:
        """Give it the launcher's uv, of the same version, which install.sh would take seconds to install."""
        script = 'mkdir -m 755 /opt/quartet && cp -a "$0" /opt/quartet/.tools'
        done = self.run("sh", "-c", script, ROOT / ".quartet" / "tools")
        assert done.returncode == 0, done.stderr

    def install(self, *arguments: object, checkout: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a checkout's install.sh."""
        return self.run(checkout / "deploy" / "systemd" / "install.sh", *arguments, **variables)

    def start(self, name: str) -> str:
        """Start a service from its unit. Return an error; empty: it is ready."""
        said = self._units[f"quartet-{name}.service"]
        variables = dict(
            line.split("=", 1)
            for file in said["EnvironmentFile"]
            for line in self.path(file.removeprefix("-")).read_text().splitlines()
            if "=" in line and not line.startswith("#")
        )
        command = [
            each
            for word in shlex.split(said["ExecStart"][0])
            for each in (variables.get(word[1:], "").split() if word.startswith("$") else [word])
        ]
        user = ("setpriv", "--reuid", said["User"][0], "--regid", said["Group"][0], "--clear-groups")
        into = ("sh", "-c", 'cd "$0" && exec "$@"', said["WorkingDirectory"][0])
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
            listener.bind(address := f"\0quartet-{name}-{os.getpid()}")
            environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **variables}
            environment["NOTIFY_SOCKET"] = "@" + address[1:]
            log = self.folder / f"{name}.log"
            process = Started(self.command(*into, *user, *command), log, env=environment)
            listener.settimeout(0.1)
            deadline = time.monotonic() + float(said["TimeoutStartSec"][0])
            while time.monotonic() < deadline and process.poll() is None:
                try:
                    if "READY=1" in listener.recv(4096).decode().splitlines():
                        self.processes[name] = process
                        return ""
                except TimeoutError:
                    continue
        process.close()
        return f"{name} is not ready, exit status {process.returncode}: {process.said()[-3000:]}\n"

    def stop(self, name: str) -> None:
        """Stop a service, if it runs."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(float(self._units[f"quartet-{name}.service"]["TimeoutStopSec"][0]))
        except subprocess.TimeoutExpired:
            process.kill()
        process.close()  # what it left of its group, as KillMode=mixed does
        self.drained[name].append(time.monotonic() - began)
        self.ended.append((name, process.returncode))

    def _systemctl(self, words: list[str]) -> str:
        """Do what install.sh wants of systemd; return an error."""
        verb, *units = [word for word in words if word != "--quiet"]
        if verb == "daemon-reload":
            files = self.path("/etc/systemd/system").glob("quartet-*.service")
            self._units |= {file.name: directives(file.read_text()) for file in files}
            return ""
        name = units[-1].removeprefix("quartet-")
        if f"quartet-{name}.service" not in self._units:
            return f"Unit quartet-{name}.service not found.\n"
        if verb == "restart":
            began = time.monotonic()
            self.stop(name)
            error = self.start(name)
            self.away[name].append(time.monotonic() - began)
            return error
        if verb == "disable" and units[0] == "--now":
            self.stop(name)
        return "" if verb in ("enable", "disable") else f"there is no systemctl {verb} here\n"

    def _handler(self) -> type[socketserver.StreamRequestHandler]:
        answer = self._systemctl

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                error = answer(json.loads(self.rfile.readline()))
                self.wfile.write(json.dumps([int(bool(error)), error]).encode() + b"\n")

        return Handler


def directives(unit: str) -> dict[str, list[str]]:
    """Return the values of a unit file by their name."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in unit.splitlines():
        if match := re.fullmatch(r"([A-Za-z]+)=(.*)", line):
            found[match[1]].append(match[2])
    return found


def plug_in(folder: Path, service: str) -> Path:
    """Write a package that needs the service's, which no index has."""
    folder.mkdir()
    (folder / "plug_in.py").touch()
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n[project]\nname = "plug-in"\n'
        f'version = "2.5"\ndependencies = ["quartet-{service}"]\n[tool.hatch.build.targets.wheel]\ninclude = ["*.py"]\n'
    )
    return folder


def _unshare() -> list[str]:
    return ["unshare", "--mount", "--propagation", "private"]
