"""docs/start.md, done as it says: its files are written, its commands run in one shell, and the time is taken."""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "docs"))

from pages import blocks  # noqa: E402

PAGE = ROOT / "docs" / "start.md"
MOST_SECONDS = 240
_CLONE = "git clone <this repository> quartet && cd quartet\n"


def own_files() -> dict[str, str]:
    """The files that a reader writes, by name: blocks whose first line is a comment that names one."""
    named = [block.text for block in blocks(PAGE) if block.text.startswith("# mine/")]
    return {text.partition("\n")[0].removeprefix("# "): text for text in named}


def follow(checkout: Path) -> float:
    """Do what the page says after the clone; return the seconds that it took. Raises CalledProcessError."""
    began = time.monotonic()
    (checkout / "mine").mkdir()
    for name, text in own_files().items():
        (checkout / name).write_text(text)
    clone, *commands = [block.text for block in blocks(PAGE) if block.info == "sh"]
    assert clone == _CLONE
    subprocess.run(["bash", "-euo", "pipefail", "-c", "".join(commands)], cwd=checkout, check=True, timeout=900)
    return time.monotonic() - began
