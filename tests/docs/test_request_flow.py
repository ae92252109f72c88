"""docs/concepts.md: the request flow of a prompt group, at most 60 modules, each connected to another by an import;
the package layout, which has the layers of the import contract."""

import ast
import re
import tomllib

from pages import ROOT

MOST = 60
FOLDERS = ("client", "services/common", *(f"services/{name}" for name in ("broker", "reward", "rollout", "trainer")))
SERVICERS = {"quartet_broker.servicer", "quartet_reward.servicer", "quartet_rollout.servicer"}
"""Reached by an RPC."""


def imported(module: str) -> set[str]:
    """Return the modules that a module imports, or imports names from."""
    (path,) = (file for folder in FOLDERS if (file := ROOT / folder / f"{module.replace('.', '/')}.py").is_file())
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
    return {
        name for node in nodes for name in (node.module or "", *(f"{node.module}.{one.name}" for one in node.names))
    }


def packages(modules: set[str]) -> set[str]:
    """Return the modules with their packages, which re-export names."""
    return modules | {module.rpartition(".")[0] for module in modules if module.count(".") > 1}


def test_request_flow_names_connected_modules():
    page = (ROOT / "docs" / "concepts.md").read_text().partition("## Request flow of one prompt group")[2]
    walk = re.findall(r"(?:^|  )(quartet_[\w.]+)  ", page.partition("```text\n")[2].partition("```")[0], re.MULTILINE)
    assert len(set(walk)) == len(walk) and 50 < len(walk) <= MOST
    uses = {module: imported(module) for module in walk}
    alone = [
        module
        for module in walk
        if module not in SERVICERS
        and not any(
            packages({module}) & uses[other] or packages({other}) & uses[module] for other in walk if other != module
        )
    ]
    assert not alone


def test_package_layout_has_the_layers_of_the_import_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    page = (ROOT / "docs" / "concepts.md").read_text().partition("## Package layout")[2]
    lines = page.partition("```text\n")[2].partition("```")[0].splitlines()
    assert [re.findall(r"quartet(?:_\w+)?", line.partition("  ")[0]) for line in lines] == [
        layer.split(" | ") for layer in contracts[0]["layers"]
    ]
