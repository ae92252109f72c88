#!/usr/bin/env python3
"""Builds a service's Dockerfile without a container engine, and starts what it describes: a rehearsal in a clean root.

    sudo deploy/containers/rehearse.py broker --set broker.redis_url='"redis://127.0.0.1:6379/0"'

debootstrap makes Debian's minimal root, which stands for the base image; every RUN is done by chroot in a copy of it,
every COPY from this checkout or from an earlier stage. Then the image's ENTRYPOINT is started as its USER with the run
file of `--file` (an empty one by default) at /etc/quartet/run.toml and the model of `--model` at /models/model, its
HEALTHCHECK is asked until it succeeds, and SIGTERM must end it with status 0. What follows the service's name goes to
its command line. The others may run on the host, whose network is the image's; with `--seconds` it has time to work
with them.

It needs root, debootstrap and a Debian mirror. PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS (a folder) and
PIP_CERT go for the build, too.
Namespaces and cgroups of an engine are not imitated.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RELEASE = "bookworm"
STEP_SECONDS = 1800
HEALTHY_SECONDS = 120
STOP_SECONDS = 60
INSTRUCTION = re.compile(r"^([A-Z]+)\s+(.*)$", re.DOTALL)


class Failure(Exception):
    """The rehearsal failed; the text says where."""


@dataclass
class Stage:
    """An image that is being made."""

    root: Path
    environment: dict[str, str] = field(
        default_factory=lambda: {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    )
    folder: str = "/"
    user: str = "0:0"
    entry: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)

    def command(self, words: list[str], user: str | None = None) -> list[str]:
        """Return what runs `words` inside."""
        change = f'cd {shlex.quote(self.folder)} && exec "$@"'
        return ["chroot", f"--userspec={user or self.user}", str(self.root), "/bin/sh", "-c", change, "sh", *words]


def instructions(text: str) -> list[tuple[str, str]]:
    """Return (instruction, rest) of a Dockerfile, continuation lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines)).splitlines()
    return [match.groups() for match in map(INSTRUCTION.match, joined) if match]


class Build:
    """The stages of one Dockerfile."""

    def __init__(self, work: Path, arguments: dict[str, str]):
        self.work = work
        self.arguments = arguments
        self.stages: dict[str, Stage] = {}
        self.stage: Stage | None = None

    def run(self, text: str) -> Stage:
        """Do every instruction; return the last stage."""
        for name, rest in instructions(text):
            step = getattr(self, f"do_{name.lower()}", None)
            if step is None:
                raise Failure(f"{name} is not rehearsed")
            print(f"{name} {rest[:100]}", flush=True)
            step(rest)
        if self.stage is None:
            raise Failure("the Dockerfile has no FROM")
        return self.stage

    def _expand(self, text: str) -> str:
        values = {**self.arguments, **(self.stage.environment if self.stage else {})}
        return re.sub(r"\$\{?(\w+)\}?", lambda match: values.get(match[1], ""), text)

    @property
    def _now(self) -> Stage:
        if self.stage is None:
            raise Failure("an instruction stands before FROM")
        return self.stage

    def do_from(self, rest: str) -> None:
        image, _, name = self._expand(rest).partition(" AS ")
        if not image.startswith(f"debian:{RELEASE}"):
            raise Failure(f"only debian:{RELEASE} can be stood for, not {image}")
        root = self.work / f"stage-{len(self.stages)}"
        subprocess.run(["cp", "-a", "--reflink=auto", str(self.work / "base"), str(root)], check=True)
        self.stage = self.stages[name.strip() or str(len(self.stages))] = Stage(root)

    def do_arg(self, rest: str) -> None:
        name, given, default = rest.partition("=")
        if given:
            self.arguments.setdefault(name, default)

    def do_env(self, rest: str) -> None:
        for pair in shlex.split(rest):
            name, _, value = pair.partition("=")
            self._now.environment[name] = self._expand(value)

    def do_run(self, rest: str) -> None:
        environment = {**self.arguments, **self._now.environment, "DEBIAN_FRONTEND": "noninteractive"}
        answer = subprocess.run(
            self._now.command(["/bin/sh", "-c", rest]),
            env=environment,
            timeout=STEP_SECONDS,
            capture_output=True,
            text=True,
        )
        if answer.returncode:
            raise Failure(f"RUN {rest}: status {answer.returncode}\n{answer.stdout[-3000:]}{answer.stderr[-3000:]}")

    def do_workdir(self, rest: str) -> None:
        self._now.folder = rest
        self._inside(rest).mkdir(parents=True, exist_ok=True)

    def do_copy(self, rest: str) -> None:
        *options, source, target = shlex.split(rest)
        base = ROOT
        for option in options:
            base = self.stages[option.removeprefix("--from=")].root
        found = base / source.lstrip("/")
        where = self._inside(target)
        where.parent.mkdir(parents=True, exist_ok=True)
        skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(found, where, symlinks=True, dirs_exist_ok=True, ignore=skip)

    def do_user(self, rest: str) -> None:
        self._now.user = rest

    def do_volume(self, rest: str) -> None:
        self._inside(rest).mkdir(parents=True, exist_ok=True)

    def do_stopsignal(self, rest: str) -> None:
        if rest != "SIGTERM":
            raise Failure(f"STOPSIGNAL {rest}: SIGTERM is what drains")

    def do_entrypoint(self, rest: str) -> None:
        self._now.entry = json.loads(rest)

    def do_healthcheck(self, rest: str) -> None:
        self._now.health = json.loads(rest.partition(" CMD ")[2])

    def _inside(self, path: str) -> Path:
        return self._now.root / os.path.join(self._now.folder, path).lstrip("/")


def make_base(base: Path, mirror: str) -> None:
    """Debian's minimal root, with the host's resolver and, where pip has one, its CA."""
    command = ["debootstrap", "--variant=minbase", RELEASE, str(base), *([mirror] if mirror else [])]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=STEP_SECONDS)
    if answer.returncode:
        raise Failure(f"debootstrap failed: {answer.stdout[-2000:]}{answer.stderr[-1000:]}")
    # No /proc and /sys are mounted into it; some installers look for these devices, which debootstrap has made.
    shutil.copy("/etc/resolv.conf", base / "etc" / "resolv.conf")
    for name in ("apt.conf.d", "sources.list.d"):
        source = Path("/etc/apt") / name
        if source.is_dir():
            shutil.copytree(source, base / "etc" / "apt" / name, dirs_exist_ok=True)


def pip_settings(base: Path) -> dict[str, str]:
    """Return what pip was told of its index, as build arguments; its CA goes into the root."""
    found = {name: os.environ[name] for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL") if os.environ.get(name)}
    if wheels := os.environ.get("PIP_FIND_LINKS"):
        shutil.copytree(wheels, base / "host-wheels")
        found |= {"PIP_FIND_LINKS": "/host-wheels", "TORCH_INDEX_URL": ""}
    if certificate := os.environ.get("PIP_CERT"):
        shutil.copy(certificate, base / "etc" / "host-ca.pem")
        found["PIP_CERT"] = "/etc/host-ca.pem"
    return found


def start(stage: Stage, run_file: Path | None, options: list[str], seconds: float) -> None:
    """Start the entry point, wait until it is healthy, let it work for so many seconds, stop it."""
    folder = stage.root / "etc" / "quartet"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.toml").write_text(run_file.read_text() if run_file else "")
    with (
        _mounted("proc", stage.root / "proc"),
        _mounted("sysfs", stage.root / "sys", "-o", "ro"),
        _mounted("tmpfs", stage.root / "dev" / "shm", "-o", "mode=1777"),
    ):
        process = subprocess.Popen(stage.command([*stage.entry, *options]), env=stage.environment)
        try:
            _wait_until_healthy(stage, process, options)
            _let_work(process, seconds)
            process.send_signal(signal.SIGTERM)
            status = process.wait(STOP_SECONDS)
            if status:
                raise Failure(f"after SIGTERM it ended with status {status}")
        finally:
            process.kill()
            process.wait()


@contextmanager
def _mounted(kind: str, where: Path, *options: str) -> Iterator[None]:
    """A file system that an engine would mount."""
    where.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", kind, *options, kind, str(where)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


def _wait_until_healthy(stage: Stage, process: subprocess.Popen, options: list[str]) -> None:
    deadline = time.monotonic() + HEALTHY_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise Failure(f"it ended at once, with status {process.returncode}")
        probe = stage.command([*stage.health, *options])
        if subprocess.run(probe, env=stage.environment, capture_output=True, timeout=HEALTHY_SECONDS).returncode == 0:
            print("healthy", flush=True)
            return
    raise Failure(f"it was not healthy within {HEALTHY_SECONDS} s")


def _let_work(process: subprocess.Popen, seconds: float) -> None:
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    raise Failure(f"it ended by itself, with status {status}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Build a Dockerfile in a clean root and start what it describes.")
    parser.add_argument("service", choices=("broker", "reward", "rollout", "trainer"))
    parser.add_argument("--file", type=Path, help="the run file")
    parser.add_argument("--model", type=Path, help="a model's folder, seen as /models/model")
    parser.add_argument("--seconds", type=float, default=0.0, help="how long it works before it is stopped")
    parser.add_argument("--mirror", default="", help="a Debian mirror; default: debootstrap's")
    parser.add_argument("--build-only", action="store_true", help="do not start it")
    arguments, options = parser.parse_known_args()
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        print("rehearse: it needs root and debootstrap", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="quartet-image-") as folder:
        Path(folder).chmod(0o755)
        try:
            make_base(Path(folder) / "base", arguments.mirror)
            build = Build(Path(folder), pip_settings(Path(folder) / "base"))
            stage = build.run((ROOT / "deploy" / "containers" / f"{arguments.service}.Dockerfile").read_text())
            if not arguments.build_only:
                if arguments.model:
                    inside = shutil.copytree(arguments.model, stage.root / "models" / "model")
                    subprocess.run(["chmod", "-R", "a+rX", str(inside)], check=True)
                start(stage, arguments.file, options, arguments.seconds)
        except (Failure, subprocess.SubprocessError) as error:
            print(f"rehearse: {error}", file=sys.stderr)
            return 1
    print(f"the image of {arguments.service} builds" + ("" if arguments.build_only else ", runs, is healthy and stops"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
