"""The NVIDIA GPUs of this machine, by nvidia-smi. Standard library only: the installer uses it too."""

from __future__ import annotations  # the installer may meet an older Python

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

GIB = 1 << 30
# For CUDA 13.0, which the GPU requirements pin: https://docs.nvidia.com/cuda/cuda-toolkit-release-notes
LEAST_DRIVER = "580.65.06"
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version")
_SECONDS = 20.0


class GpuError(Exception):
    """The GPUs of this machine cannot be counted; the text is one sentence."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: `index` by PCI bus, as nvidia-smi counts; memory in bytes."""

    index: int
    uuid: str
    name: str
    memory: int
    free: int
    driver: str

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.free / GIB:.1f} of {self.memory / GIB:.1f} GiB free)"


def read_gpus(environment: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES selects, in its order; none without an NVIDIA driver.

    Raises:
        GpuError: the variable names a GPU that does not exist, or nvidia-smi has no numbers for one.
    """
    gpus = [_parse(line) for line in _query(*_FIELDS).splitlines()]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not gpus:
        return gpus
    return [_named(word.strip(), gpus) for word in visible.split(",") if word.strip() not in ("", "-1")]


def old_driver(gpus: Sequence[Gpu]) -> str:
    """Return what is wrong with the driver of these GPUs; empty if nothing is."""
    least = [int(part) for part in LEAST_DRIVER.split(".")]
    for gpu in gpus:
        if [int(part) for part in gpu.driver.split(".") if part.isdigit()] < least:
            return f"the NVIDIA driver is {gpu.driver}, and CUDA 13.0 needs {LEAST_DRIVER} or newer"
    return ""


def _query(*fields: str) -> str:
    """Return nvidia-smi's line of comma-separated values for each GPU; "" if it fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()


def _parse(line: str) -> Gpu:
    values = [value.strip() for value in line.split(",")]
    try:
        index, uuid, name, total, free, driver = values
        return Gpu(int(index), uuid, name, int(total) << 20, int(free) << 20, driver)
    except ValueError as error:
        raise GpuError(f"nvidia-smi: got '{line}'; allowed: numbers for {', '.join(_FIELDS)}") from error


def _named(word: str, gpus: list[Gpu]) -> Gpu:
    for gpu in gpus:
        if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word)):
            return gpu
    there = ", ".join(str(gpu.index) for gpu in gpus)
    raise GpuError(f"CUDA_VISIBLE_DEVICES: got '{word}'; allowed: {there}, or UUIDs as `nvidia-smi -L` lists them")
