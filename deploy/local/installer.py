"""Installs a pinned uv, runs it with a timeout, and explains its failures. Standard library only, as `environments.py`
uses it before any environment exists.
"""

from __future__ import annotations  # as in environments.py

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".quartet"
UV_VERSION = "0.13.8"
INSTALL_TIMEOUT = 3600.0  # seconds; a CUDA build of torch over a slow line takes long


class EnvironmentFailure(Exception):
    """An environment could not be made; the text is one sentence for the user."""


def say(text: str) -> None:
    """Print a progress line."""
    print(text, flush=True)


def ensure_uv() -> Path:
    """Return the path of the pinned uv in `.quartet/tools`, which the first call installs with pip."""
    tools = STATE / "tools"
    uv = tools / "bin" / "uv"
    with lock(STATE / "tools.lock"):
        if uv.exists() and (tools / "version").exists() and (tools / "version").read_text() == UV_VERSION:
            return uv
        say("tools: installing uv …")
        shutil.rmtree(tools, ignore_errors=True)
        run_command("tools: creating their environment", [sys.executable, "-m", "venv", str(tools)])
        pip = [str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}"]
        run_command("tools: installing uv", pip)
        (tools / "version").write_text(UV_VERSION)
    return uv


def run_command(what: str, command: list[str]) -> None:
    """Run one installer command. Raises EnvironmentFailure with the end of its output."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=installer_environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + INSTALL_TIMEOUT
    started = time.monotonic()
    output = ""
    try:
        while True:
            try:
                output, _ = process.communicate(timeout=30)
                break
            except subprocess.TimeoutExpired:
                if time.monotonic() > deadline:
                    raise EnvironmentFailure(f"{what} took longer than {INSTALL_TIMEOUT:.0f} s") from None
                say(f"{what}, {time.monotonic() - started:.0f} s so far")
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0:
        raise EnvironmentFailure(f"{what} failed: {explain(output)}")


def explain(output: str) -> str:
    """Return the cause of a failure, from the installer's output, as part of a sentence."""
    lowered = output.lower()
    network = ("failed to fetch", "error sending request", "connection", "dns error", "name resolution", "timed out")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    tail = " | ".join(lines[-6:]) or "it printed nothing"
    if "ensurepip" in lowered:
        return "this Python cannot make virtual environments; install its venv package (Debian: python3-venv)"
    if any(sign in lowered for sign in network):
        return f"the package index does not answer; check the network or set PIP_INDEX_URL ({tail})"
    return tail


def installer_environment() -> dict[str, str]:
    """Return the process environment with pip's variables copied to uv's."""
    environment = dict(os.environ)
    environment.pop("VIRTUAL_ENV", None)
    environment.pop("PYTHONPATH", None)
    for pip_name, uv_name in (
        ("PIP_FIND_LINKS", "UV_FIND_LINKS"),
        ("PIP_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("PIP_EXTRA_INDEX_URL", "UV_INDEX"),
        ("PIP_CERT", "SSL_CERT_FILE"),
    ):
        if environment.get(pip_name) and not environment.get(uv_name):
            environment[uv_name] = environment[pip_name]
    if not environment.get("HOME"):
        environment.setdefault("UV_CACHE_DIR", str(STATE / "cache" / "uv"))
        environment.setdefault("PIP_CACHE_DIR", str(STATE / "cache" / "pip"))
        environment.setdefault("UV_PYTHON_INSTALL_DIR", str(STATE / "python"))
    environment.setdefault("UV_HTTP_TIMEOUT", "180")
    environment["NO_COLOR"] = "1"
    return environment


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold a file lock, so that a second process (another `make`) waits while this one installs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
