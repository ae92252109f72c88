"""The programs that make pages stand in docs/tools, the interpreters that suites share in tests/preloaded."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs" / "tools"), str(ROOT / "tests" / "preloaded")]
