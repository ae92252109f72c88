"""Prometheus' promtool: the system's, else that of Debian's package, unpacked and not installed."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".quartet" / "tools"
SECONDS = 120


class NoPromtool(Exception):
    """It is not here and cannot be had; the text says why."""


def promtool() -> str:
    """Return its path. Raises NoPromtool."""
    if system := shutil.which("promtool"):
        return system
    unpacked = FOLDER / "prometheus"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "prometheus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unpacked.exists():
            _unpack(unpacked)
    return str(unpacked / "usr" / "bin" / "promtool")


def _unpack(folder: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise NoPromtool("there is no promtool, and no apt-get to get Debian's package prometheus")
    with tempfile.TemporaryDirectory(dir=FOLDER) as aside:
        os.chmod(aside, 0o755)
        for command in (("apt-get", "download", "prometheus"), ("sh", "-c", "dpkg -x prometheus_*.deb prometheus")):
            answer = subprocess.run(command, cwd=aside, capture_output=True, text=True, timeout=SECONDS, check=False)
            if answer.returncode:
                raise NoPromtool(f"there is no promtool; {' '.join(command)}: {answer.stderr.strip()[-300:]}")
        Path(aside, "prometheus").rename(folder)
