"""Checks who imports whom: the contracts of `[tool.importlinter]` in pyproject.toml, over all packages of the checkout.

Nothing is imported to find out, so none of the services' dependencies is needed.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    "protos/python",
    *(f"services/{name}" for name in ("common", "broker", "environment", "reward", "rollout", "trainer")),
    "client",
    "tests/contract/suite",
    "deploy/local",
)

if __name__ == "__main__":
    try:
        from importlinter.cli import lint_imports
    except ModuleNotFoundError:
        sys.exit("import-linter is missing: python3 deploy/local/environments.py --with-tests dev")
    sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]
    sys.exit(lint_imports(str(ROOT / "pyproject.toml"), no_cache=True, no_logo=True))
