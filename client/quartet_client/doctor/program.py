"""The service's own program: where it is, and what it says to its configuration."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from quartet_client.doctor.findings import Finding, failure, ok, warning

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


def check_sandbox(program: Path, file: Path | None, overrides: Sequence[str]) -> Finding:
    """Have the reward service try its sandbox and attack it, whether its run needs it or not."""
    finding = check_preflight(program, file, [*overrides, "reward.sandbox.required=true"])
    if finding.state != "ok":
        return warning("sandbox", finding.what, "verifiers that run programs need it: docs/sandbox.md")
    mode = next(part for part in finding.what.split(", ") if part.startswith("sandbox "))
    return ok("sandbox", f"programs run in the mode {mode.removeprefix('sandbox ')}")


def check_preflight(program: Path, file: Path | None, overrides: Sequence[str]) -> Finding:
    """Have the service check its configuration and what that names: Redis, model, sandbox, verifiers."""
    command = [str(program), *([str(file)] if file else []), "--dry-run"]
    command += [word for override in overrides for word in ("--set", override)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_PREFLIGHT_SECONDS)
    except subprocess.TimeoutExpired:
        return failure("preflight", f"no answer in {_PREFLIGHT_SECONDS:.0f} s", f"run it: {' '.join(command)}")
    if answer.returncode:
        said = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        return failure("preflight", said[-1], "the sentence says what is wrong and what is allowed")
    plan = json.loads(answer.stdout)
    told = [
        f"{key} {value}" for key, value in plan.items() if key in ("address", "redis", "sandbox", "engine", "model")
    ]
    return ok("preflight", ", ".join(told))
