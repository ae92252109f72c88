"""Build hook: one package. The wheel contains the contract's stubs and `quartet_common` too, which no index has."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Adds the two packages of the checkout to a wheel; an editable install finds them by `dev-mode-dirs`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build. `version` is "standard" or "editable"."""
        if version == "standard":
            checkout = Path(self.root).parent
            for package in ("services/common/quartet_common", "protos/python/quartet"):
                build_data["force_include"][str(checkout / package)] = Path(package).name
