#!/usr/bin/env python3
"""Creates the named Python environments of this checkout under `.quartet/`. It needs only Python 3.11 or later.

    python3 deploy/local/environments.py [--gpu | --cpu] [--with-tests] [NAME ...]

Without a NAME it creates broker, reward, reward-model, environment, environment-packages, environment-openenv,
rollout, trainer, client and dev.

Each service has its own environment, because vLLM and ColossalAI pin conflicting packages. It holds the pinned closure
of `services/NAME/requirements.txt` (with `overrides.txt` if that exists) and the packages of this checkout as editable
installs. A stamp file in each environment records a digest of its requirements: a second call does nothing, and a
changed requirement rebuilds only the environments that use it. `--with-tests` adds `deploy/local/requirements-test.txt`
(pytest) and, if it exists, `services/NAME/requirements-test.txt`. `--add PACKAGE` adds a user's package to one
environment permanently: `.quartet/added/NAME.txt` lists those; `--remove PACKAGE` undoes it. An environment without a
stamp was made by hand and is not changed.

Rollout and trainer have a second closure for CUDA, `requirements-gpu.txt`. `--gpu` selects it; it is the default on a
host with GPUs and a recent enough driver. An existing environment keeps its kind unless `--gpu` or `--cpu` is given.

`PIP_FIND_LINKS`, `PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL` and `PIP_CERT` are passed on to uv. If none of the first three
is set, torch comes from PyTorch's own index (`torch_options`); otherwise the named index must have it.
"""

from __future__ import annotations  # so that an older Python can run this file far enough to print that it is too old

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from installer import ROOT, STATE, UV_VERSION, EnvironmentFailure, ensure_uv, lock, run_command, say

sys.path.append(str(ROOT / "services" / "common"))  # quartet_common.gpus needs the standard library only

from quartet_common.gpus import LEAST_DRIVER, GpuError, old_driver, read_gpus  # noqa: E402

FORMAT = 1  # increment it when the way environments are made changes: existing ones are then rebuilt
REQUIREMENTS_TEST = "deploy/local/requirements-test.txt"


@dataclass(frozen=True)
class Environment:
    """The contents of one environment; paths are relative to the checkout."""

    name: str
    contents: str  # its largest packages, for the progress line
    requirements: str
    packages: tuple[str, ...]  # folders installed as editable; `requirements` has their dependencies
    overrides: str = ""
    torch: str = ""  # uv's --torch-backend: the build of torch to take from PyTorch's own index
    heavy: bool = False
    on_demand: bool = False  # made only if named on the command line
    gpu_requirements: str = ""  # the closure for CUDA, where there is one
    profile: str = "cpu"

    @property
    def folder(self) -> Path:
        return STATE / "envs" / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def service(name: str, contents: str, torch: str = "") -> Environment:
    requirements, overrides = f"services/{name}/requirements.txt", f"services/{name}/overrides.txt"
    overrides = overrides if (ROOT / overrides).exists() else ""
    gpu = f"services/{name}/requirements-gpu.txt" if torch else ""
    package = (f"services/{name}",)
    return Environment(name, contents, requirements, package, overrides, torch, bool(torch), gpu_requirements=gpu)


ENVIRONMENTS: dict[str, Environment] = {
    environment.name: environment
    for environment in (
        service("broker", "Redis client"),
        service("reward", "math-verify"),
        service("environment", "openai"),
        service("rollout", "vLLM and transformers 5", torch="cpu"),
        service("trainer", "ColossalAI and transformers 5", torch="cpu"),
        # The reward service with its extra, for the tests of the learned reward model.
        Environment(
            "reward-model",
            "math-verify, torch and transformers",
            "services/reward/requirements-reward-model.txt",
            ("services/reward",),
            torch="auto",
            heavy=True,
        ),
        # The environment service with packages whose environments it plays, for their tests.
        Environment(
            "environment-packages",
            "verifiers and reasoning-gym",
            "services/environment/requirements-packages.txt",
            ("services/environment",),
        ),
        # The same with OpenEnv, which cannot be installed beside verifiers.
        Environment(
            "environment-openenv",
            "OpenEnv",
            "services/environment/requirements-openenv.txt",
            ("services/environment",),
        ),
        Environment(
            "client",
            "command and launcher",
            "client/requirements.txt",
            ("client", "deploy/local"),
        ),
        Environment(
            "dev",
            "test and lint tools",
            "requirements-dev.txt",
            ("client", "deploy/local"),
        ),
        # The peer of benchmarks/broker_ray.py; no service, test or client uses it.
        Environment("bench-ray", "Ray and torch", "benchmarks/requirements-ray.txt", (), heavy=True, on_demand=True),
        # The peer of benchmarks/trl_grpo.py, likewise.
        Environment("bench-trl", "TRL and torch", "benchmarks/requirements-trl.txt", (), heavy=True, on_demand=True),
    )
}


def find(name: str) -> Environment:
    """Return the environment of that name. Raises EnvironmentFailure."""
    if name not in ENVIRONMENTS:
        raise EnvironmentFailure(f"no environment is called {name!r}: there are {', '.join(ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def make(names: list[str], with_tests: bool = False, profile: str = "") -> None:
    """Make those of the named environments that are missing or out of date. Raises EnvironmentFailure.

    `profile`: "gpu", "cpu", or empty: existing environments keep theirs, new ones get what suits this host.
    """
    wanted = [profiled(environment, profile) for environment in map(find, dict.fromkeys(names))]
    missing = [environment for environment in wanted if not is_current(environment, with_tests)]
    if not missing:
        return
    uv = ensure_uv()
    for environment in sorted(missing, key=lambda each: each.heavy):
        make_one(uv, environment, with_tests)


def add(name: str, packages: list[str]) -> None:
    """Install a user's packages into an environment, now and at every rebuild. Raises EnvironmentFailure.

    Each is a requirement, a folder with a package or a requirements file. If installing fails, none is recorded.
    """
    environment = find(name)
    if is_by_hand(environment):
        raise EnvironmentFailure(
            f"{name} environment: a person made it; install there yourself: "
            f"uv pip install --python {environment.python} {' '.join(packages)}"
        )
    record(environment, list(dict.fromkeys([*added_lines(environment), *map(added_line, packages)])))


def remove(name: str, packages: list[str]) -> None:
    """Undo `add`, for packages as they were given there or by their names. Raises EnvironmentFailure: one was not."""
    lines, gone = added_lines(find(name)), set[str]()
    for package in packages:
        given = {package, str(Path(package).expanduser().resolve())}  # the path may be gone since
        found = {line for line in lines if given & {re.sub("^-[er] ", "", line), re.split(r"[^\w.-]", line)[0]}}
        if not found:
            raise EnvironmentFailure(f"{name} environment: {package!r} was not added; {', '.join(lines) or 'none'} was")
        gone |= found
    record(find(name), [line for line in lines if line not in gone])


def added_lines(environment: Environment) -> list[str]:
    file = added_file(environment)
    return file.read_text().splitlines() if file.exists() else []


def record(environment: Environment, lines: list[str]) -> None:
    """Let these be a user's packages in an environment, and make it; if that fails, they stay what they were."""
    before, file = added_lines(environment), added_file(environment)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in lines))
    try:
        make([environment.name])
    except BaseException:
        file.write_text("".join(f"{line}\n" for line in before))
        raise


def added_line(package: str) -> str:
    """Return the line of a requirements file for a package. Paths are absolute; folders are editable installs."""
    path = Path(package).expanduser()
    if not path.exists():
        return package
    option = "-e " if path.is_dir() else "-r " if path.suffix == ".txt" else ""
    return f"{option}{path.resolve()}"


def added_file(environment: Environment) -> Path:
    """Return the file that lists a user's packages; not in the environments' folder, which may be deleted."""
    return STATE / "added" / f"{environment.name}.txt"


def files_of_added(environment: Environment) -> list[str]:
    """Return the list of a user's packages, and the requirements files and pyproject.toml files it names."""
    named = [line.partition(" ")[::2] for line in added_lines(environment)]
    files = [Path(path, "pyproject.toml") if option == "-e" else Path(path) for option, path in named if path]
    return [str(added_file(environment)), *(str(each) for each in files if each.is_file())]


def profiled(environment: Environment, profile: str) -> Environment:
    """Return the environment for GPUs or for the CPU. Raises EnvironmentFailure if the GPUs' driver is too old."""
    if not environment.gpu_requirements or is_by_hand(environment):
        return environment
    stamp = read_stamp(environment)
    chosen = profile or str(stamp.get("profile", "cpu") if stamp else choose_profile())
    if chosen == "cpu":
        return environment
    if old := old_driver(read_gpus()):
        raise EnvironmentFailure(f"{environment.name} environment: {old}; update it, or make it with --cpu")
    contents = f"{environment.contents}, for CUDA 13.0 (driver {LEAST_DRIVER} or newer)"
    return replace(environment, requirements=environment.gpu_requirements, contents=contents, torch="", profile="gpu")


def choose_profile() -> str:
    """Return "gpu" or "cpu", as this host is. Prints the reason if GPUs are present but cannot be used."""
    gpus = read_gpus()
    if old := old_driver(gpus):
        say(f"packages for the CPU: {old}")
        return "cpu"
    return "gpu" if gpus else "cpu"


def make_one(uv: Path, environment: Environment, with_tests: bool) -> None:
    name = environment.name
    with lock(STATE / "envs" / f"{name}.lock"):
        if is_current(environment, with_tests):  # another process made it while this one waited
            return
        say(f"{name} environment: installing {environment.contents} …")
        started = time.monotonic()
        stamp = read_stamp(environment)
        with_tests = with_tests or stamp.get("tests") is not None
        digests = wanted_stamp(environment, with_tests)
        if not stamp or not environment.python.exists():  # missing, or an earlier call was interrupted
            shutil.rmtree(environment.folder, ignore_errors=True)
        unfinished(environment).touch()
        install(uv, environment, with_tests)
        stamp_file(environment).write_text(json.dumps(digests, indent=2) + "\n")
        unfinished(environment).unlink()
        say(f"{name} environment: ready after {time.monotonic() - started:.0f} s")


def install(uv: Path, environment: Environment, with_tests: bool) -> None:
    def run(what: str, *arguments: str) -> None:
        run_command(f"{environment.name} environment: {what}", [str(uv), *arguments])

    if not environment.python.exists():
        create_virtual_environment(uv, environment)
    python = ("--python", str(environment.python))
    override_options = ("--overrides", str(ROOT / environment.overrides)) if environment.overrides else ()
    files = [environment.requirements, *(test_requirements(environment) if with_tests else ())]
    requirements = [part for file in files for part in ("-r", str(ROOT / file))]
    editables = [part for package in environment.packages for part in ("--editable", str(ROOT / package))]
    command = ("pip", "install", *python, "--exact", *requirements, *editables, *override_options)
    try:
        run("installing its requirements", *command, *torch_options(environment.torch, os.environ))
    except EnvironmentFailure as failure:
        if not torch_options(environment.torch, os.environ):
            raise
        say(f"{environment.name} environment: trying again without PyTorch's own index ({failure})")
        run("installing its requirements", *command)
    if added_lines(environment):
        pins = ("--constraint", str(ROOT / environment.requirements), *override_options)
        what = f"installing what {added_file(environment).relative_to(ROOT)} adds"
        run(what, "pip", "install", *python, "-r", str(added_file(environment)), *pins)


def torch_options(build: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return uv's options for a build of torch; none if the user's variables name an index or a build.

    vLLM's CPU build needs torch's CPU build, which only PyTorch's own index has. "auto" selects the build for this
    machine's GPU, else the CPU build, which is much smaller than PyPI's build.
    """
    user_set = ("UV_TORCH_BACKEND", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_FIND_LINKS")
    if not build or any(variables.get(name) for name in (*user_set, "UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL")):
        return ()
    return ("--torch-backend", build)


def create_virtual_environment(uv: Path, environment: Environment) -> None:
    """Create it with Python 3.11, for which the pins were resolved (uv downloads one if necessary), else 3.12."""
    try:
        what = f"{environment.name} environment: creating it"
        run_command(what, [str(uv), "venv", "--python", "3.11", str(environment.folder)])
    except EnvironmentFailure as failure:
        try:
            run_command(what, [str(uv), "venv", "--python", "3.12", str(environment.folder)])
        except EnvironmentFailure:
            raise EnvironmentFailure(
                f"{environment.name} environment: found no Python 3.11 or 3.12 and could not download one; "
                f"install Python 3.11 and try again ({failure})"
            ) from None


# --- What is up to date -----------------------------------------------------------------------------------------------


def is_by_hand(environment: Environment) -> bool:
    """Return whether a person made it: it has an interpreter, and this script neither finished nor began it."""
    return environment.python.exists() and not stamp_file(environment).exists() and not unfinished(environment).exists()


def is_current(environment: Environment, with_tests: bool) -> bool:
    if is_by_hand(environment):
        return True
    stamp = read_stamp(environment)
    if not environment.python.exists() or not stamp:
        return False
    wanted = wanted_stamp(environment, with_tests or stamp.get("tests") is not None)
    return stamp == wanted


def stamp_file(environment: Environment) -> Path:
    return environment.folder / "quartet-stamp.json"


def unfinished(environment: Environment) -> Path:
    """Return the file that exists while the environment is being made, and after an interruption."""
    return STATE / "envs" / f"{environment.name}.unfinished"


def read_stamp(environment: Environment) -> dict[str, str | None]:
    if unfinished(environment).exists():
        return {}
    try:
        return dict(json.loads(stamp_file(environment).read_text()))
    except (FileNotFoundError, ValueError):
        return {}


def wanted_stamp(environment: Environment, with_tests: bool) -> dict[str, str | None]:
    """Return digests of everything that determines an environment's contents, except editable code."""
    files = [environment.requirements, *(f"{package}/pyproject.toml" for package in environment.packages)]
    if environment.overrides:
        files.append(environment.overrides)
    missing = [file for file in files if not (ROOT / file).exists()]
    if missing:
        raise EnvironmentFailure(f"{environment.name} environment: {missing[0]} is missing from this checkout")
    return {
        "root": str(ROOT),
        "format": f"{FORMAT} uv {UV_VERSION}",
        "contents": digest(files),
        "tests": digest(test_requirements(environment)) if with_tests else None,
        **({"profile": environment.profile} if environment.profile != "cpu" else {}),
        **({"added": digest(files_of_added(environment))} if added_lines(environment) else {}),
    }


def digest(files: list[str]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.encode() + b"\0" + (ROOT / file).read_bytes() + b"\0")
    return total.hexdigest()


def test_requirements(environment: Environment) -> list[str]:
    """Return the requirements files of all services' tests and, if it exists, of this service's."""
    own = str(Path(environment.requirements).with_name("requirements-test.txt"))
    return [REQUIREMENTS_TEST, own] if (ROOT / own).exists() else [REQUIREMENTS_TEST]


def main(arguments: list[str] | None = None) -> int:
    if sys.version_info < (3, 11):
        for name in ("python3.11", "python3.12", "python3.13"):
            if shutil.which(name):
                os.execvp(name, [name, str(Path(__file__).resolve()), *sys.argv[1:]])
        found = ".".join(str(part) for part in sys.version_info[:3])
        print(f"Quartet needs Python 3.11 or later to set itself up; this is Python {found}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(description="Make the environments of this checkout.")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of {', '.join(ENVIRONMENTS)}; default: all but the bench-… ones",
    )
    parser.add_argument("--with-tests", action="store_true", help="add pytest and its plug-ins")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--gpu", dest="profile", action="store_const", const="gpu", help="rollout and trainer for CUDA")
    kind.add_argument(
        "--cpu", dest="profile", action="store_const", const="cpu", help="rollout and trainer for the CPU"
    )
    parser.add_argument("--add", action="append", default=[], metavar="PACKAGE", help="to the one NAME, permanently")
    parser.add_argument("--remove", action="append", default=[], metavar="PACKAGE", help="what --add added to NAME")
    parser.add_argument("--quiet", action="store_true", help="say nothing unless something fails")
    options = parser.parse_args(arguments)
    if (options.add or options.remove) and len(options.names) != 1:
        parser.error("--add and --remove need the NAME of one environment")
    if options.quiet:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (stays open until the process ends)
    try:
        if options.add:
            add(options.names[0], options.add)
            return 0
        if options.remove:
            remove(options.names[0], options.remove)
            return 0
        by_default = [name for name, environment in ENVIRONMENTS.items() if not environment.on_demand]
        make(options.names or by_default, options.with_tests, options.profile or "")
    except (EnvironmentFailure, GpuError) as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; what was being installed is finished by the next call", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
