"""Makes the helpers of the reward service's tests importable: a running service, items, verdicts, sandbox modes."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "services" / "reward" / "tests"))

from sandbox_modes import sandbox  # noqa: E402, F401
