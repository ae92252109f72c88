"""A script that stands for nvidia-smi on a machine without a GPU."""

from pathlib import Path

import pytest

_SCRIPT = """#!/bin/sh
[ "$1" = --query-gpu=driver_version ] && echo {driver} && exit
cat <<'END'
{says}
END
exit {status}
"""


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int = 2, driver: str = "580.95.05", says: str = "", status=0
) -> None:
    """Have `nvidia-smi` list so many GPUs of 80 GiB, all but one of them free, or say what is given, from now on."""
    gpus = [f"{index}, GPU-{index}a-b, NVIDIA H100, 81920, 80896, {driver}" for index in range(count)]
    folder.mkdir(exist_ok=True)
    script = folder / "nvidia-smi"
    script.write_text(_SCRIPT.format(driver=driver, says=says or "\n".join(gpus), status=status))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
