"""Build hook: one package. The wheel contains the contract's stubs and `quartet_common` too, which no index has."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SERVER_PARTS = {f"{name}.py" for name in ("cli", "host", "interceptor", "metrics", "stderr", "stderr_reader")}
"""Of `quartet_common`: what servers alone need, with packages that the client does without."""


class CustomBuildHook(BuildHookInterface):
    """Adds the two packages of the checkout to a wheel; an editable install finds them by `dev-mode-dirs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build. `version` is "standard" or "editable"."""
        if version != "standard":
            return
        checkout = Path(self.root).parent
        for place in ("services/common/quartet_common", "protos/python/quartet"):
            package = checkout / place
            for file in (path for ending in ("py", "pyi", "toml") for path in package.rglob(f"*.{ending}")):
                if file.name not in SERVER_PARTS:
                    build_data["force_include"][str(file)] = str(file.relative_to(package.parent))
