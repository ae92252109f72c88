"""The service's own program: where it is, and what it says to its configuration."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from quartet_client.doctor.findings import Finding, failure, ok

_PREFLIGHT_SECONDS = 120.0


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


def check_preflight(program: Path, file: Path | None, overrides: Sequence[str], port: bool) -> Finding:
    """Have the service check its configuration and what that names: Redis, model, sandbox, verifiers, ports."""
    command = [str(program), *([str(file)] if file else []), "--dry-run", *(["--check-port"] if port else [])]
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
