"""Build hook: one wheel. It contains what no index has: the stubs, `quartet_common`, the suite of contract tests."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CONTRACT_SUITE = "tests/contract/suite/quartet_contract"
"""`quartet contract-test`; what it needs besides is the extra `contract`."""


class CustomBuildHook(BuildHookInterface):
    """Adds these packages of the checkout to a wheel; an editable install finds them by `dev-mode-dirs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build. `version` is "standard" or "editable"."""
        if version != "standard":
            return
        checkout = Path(self.root).parent
        for place in ("services/common/quartet_common", "protos/python/quartet", CONTRACT_SUITE):
            package = checkout / place
            for file in (path for ending in ("py", "pyi", "toml", "ini") for path in package.rglob(f"*.{ending}")):
                build_data["force_include"][str(file)] = str(file.relative_to(package.parent))
