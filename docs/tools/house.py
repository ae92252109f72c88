"""The diagram of the packages, their subpackages and their imports, generated from the source."""

import ast
from functools import cache
from pathlib import Path

import pictures

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "protos": ROOT / "protos" / "python" / "quartet",
    "quartet_common": ROOT / "services" / "common" / "quartet_common",
    "quartet_server": ROOT / "services" / "common" / "quartet_server",
    "quartet_weights": ROOT / "services" / "common" / "quartet_weights",
    **{
        f"quartet_{service}": ROOT / "services" / service / f"quartet_{service}"
        for service in ("reward", "broker", "rollout", "trainer")
    },
    "quartet_client": ROOT / "client" / "quartet_client",
    "quartet_local": ROOT / "deploy" / "local" / "quartet_local",
}
KINDS = {f"quartet_{name}": name for name in ("broker", "reward", "rollout", "trainer")}
WIDTH, HEIGHT, GAP_X, GAP_Y, EDGE = 210, 112, 24, 52, 20


@cache
def imports() -> dict[str, set[str]]:
    """Return the packages that each package imports at module level, without those implied by others."""
    found: dict[str, set[str]] = {}
    for package, folder in PACKAGES.items():
        heads = [node for path in folder.rglob("*.py") for node in ast.parse(path.read_text()).body]
        names = {alias.name for node in heads if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in heads if isinstance(node, ast.ImportFrom)}
        tops = {"protos" if name.startswith("quartet.") else name.partition(".")[0] for name in names}
        found[package] = (tops & PACKAGES.keys()) - {package}
    direct = {package: set(others) for package, others in found.items()}
    for package, others in found.items():
        for other in others:
            direct[package] -= found[other]
    return direct


def level(package: str) -> int:
    """Return the length of the longest import chain from a package."""
    return max((level(other) + 1 for other in imports()[package]), default=0)


def parts(package: str) -> list[str]:
    """Return the subpackages of a package, in as many lines as fit."""
    names = sorted(path.parent.name for path in PACKAGES[package].glob("*/__init__.py"))
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > 26:
            lines.append("")
        lines[-1] += f", {name}" if lines[-1] else name
    return [line for line in lines if line][:4]


def house() -> str:
    """Return the diagram."""
    rows: dict[int, list[str]] = {}
    for package in PACKAGES:
        rows.setdefault(level(package), []).append(package)
    highest, widest = max(rows), max(map(len, rows.values()))
    width = 2 * EDGE + widest * WIDTH + (widest - 1) * GAP_X
    drawn, at = [], {}
    for number, row in rows.items():
        left = (width - len(row) * WIDTH - (len(row) - 1) * GAP_X) // 2
        for place, package in enumerate(row):
            at[package] = (left + place * (WIDTH + GAP_X), EDGE + (highest - number) * (HEIGHT + GAP_Y))
    for package, others in imports().items():
        for other in sorted(others):
            (x, y), (to_x, to_y) = at[package], at[other]
            drawn.append(pictures.arrow(f"M{x + WIDTH // 2} {y + HEIGHT}L{to_x + WIDTH // 2} {to_y - 2}"))
    drawn += [
        pictures.box(*at[package], WIDTH, HEIGHT, KINDS.get(package, "plain"), package, *parts(package))
        for package in PACKAGES
    ]
    return pictures.picture(
        width,
        2 * EDGE + (highest + 1) * HEIGHT + highest * GAP_Y,
        "The house",
        "; ".join(
            f"{package} imports {' and '.join(sorted(others))}" for package, others in imports().items() if others
        ),
        drawn,
    )
