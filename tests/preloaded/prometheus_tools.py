"""Prometheus and promtool: the system's, else those of Debian's package, unpacked and not installed."""

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".quartet"  # not its tools/, which other tests copy
SECONDS = 120


class NoPrometheus(Exception):
    """It is not here and cannot be had; the text says why."""


def prometheus_tool(name: str) -> str:
    """Return the path of `prometheus` or `promtool`. Raises NoPrometheus."""
    if system := shutil.which(name):
        return system
    unpacked = FOLDER / "prometheus"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "prometheus.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not unpacked.exists():
            _unpack(unpacked)
    return str(unpacked / "usr" / "bin" / name)


def _unpack(folder: Path) -> None:
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise NoPrometheus("there is no Prometheus, and no apt-get to get Debian's package of it")
    with tempfile.TemporaryDirectory(dir=FOLDER) as aside:
        os.chmod(aside, 0o755)
        for command in (("apt-get", "download", "prometheus"), ("sh", "-c", "dpkg -x prometheus_*.deb prometheus")):
            answer = subprocess.run(command, cwd=aside, capture_output=True, text=True, timeout=SECONDS, check=False)
            if answer.returncode:
                raise NoPrometheus(f"there is no Prometheus; {' '.join(command)}: {answer.stderr.strip()[-300:]}")
        Path(aside, "prometheus").rename(folder)
