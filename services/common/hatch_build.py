"""Build hook of every package: a wheel or sdist contains Quartet's own packages that it imports, and needs no checkout.

Each package has a link to this file. `[tool.hatch.build.hooks.custom] packages` names what it takes from the checkout;
a wheel that is built from an sdist finds them there. An editable install has them by `dev-mode-dirs`.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ENDINGS = (".py", ".pyi", ".toml", ".ini")


class BundleHook(BuildHookInterface):
    """Adds the packages, the build's name (`quartet_common/BUILD`) and the license."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before each build. `version` is "standard" or "editable"."""
        if version == "editable":
            return
        root, included = Path(self.root), build_data["force_include"]
        unpacked = root / "PKG-INFO"  # of an sdist
        for place in map(Path, self.config["packages"]):
            package = (root / place.name if unpacked.exists() else root / place).resolve(strict=True)
            for file in sorted(package.rglob("*")):
                if file.suffix in ENDINGS or file.name == "BUILD":
                    included[str(file)] = str(file.relative_to(package.parent))
        if not unpacked.exists():
            included[self._written_build()] = "quartet_common/BUILD"
            for link in filter(os.path.islink, list(included)):  # an sdist has the license and this file, not links
                included[os.path.realpath(link)] = included.pop(link)

    def _written_build(self) -> str:
        self._folder = tempfile.TemporaryDirectory()  # as long as this hook
        file = Path(self._folder.name, "BUILD")
        file.write_text(f"{self.metadata.version}\n")
        return str(file)
