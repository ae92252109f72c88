"""The suites of this checkout: what each runs, in which environment, for how long at most."""

from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Suite:
    """Commands that pass or fail together (`commands`), or the tests of a folder (`folder`), all or some (`tests`)."""

    name: str
    environment: str
    limit: float  # seconds; the longest suites are started first
    folder: str = ""
    commands: tuple[tuple[str, ...], ...] = ()
    tests: tuple[str, ...] = ()  # pytest's paths and ids
    alone: bool = False  # keeps all cores busy, or measures time or memory

    @property
    def exists(self) -> bool:
        return not self.folder or (ROOT / self.folder).is_dir()


def buf_breaking() -> tuple[tuple[str, ...], ...]:
    """One comparison with each released descriptor image."""
    images = sorted((ROOT / "protos" / "released").glob("*.binpb"))
    return tuple(("buf", "breaking", "protos", "--against", str(image.relative_to(ROOT))) for image in images)


# Packages without torch, whose every dependency is in the development environment.
TYPED = (
    "services/common/quartet_common",
    "services/broker/quartet_broker",
    "services/reward/quartet_reward",
    "client/quartet_client",
    "deploy/local/quartet_local",
)

SUITES = (
    Suite(
        "lint",
        "dev",
        240,
        commands=(("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy", *TYPED)),
    ),
    Suite("protos", "dev", 60, commands=(("buf", "lint", "protos"), *buf_breaking())),
    Suite("common", "dev", 300, "services/common/tests"),
    Suite("broker", "broker", 700, "services/broker/tests"),
    Suite("reward", "reward", 400, "services/reward/tests"),
    Suite("reward-model", "reward-model", 300, "services/reward/tests_reward_model"),
    Suite("rollout", "rollout", 900, "services/rollout/tests"),
    Suite("trainer", "trainer", 900, "services/trainer/tests"),
    Suite("client", "client", 300, "client/tests"),
    Suite("launcher", "dev", 900, "deploy/local/tests", alone=True),
    Suite("deploy", "dev", 500, "tests/deploy"),
    Suite("docs", "dev", 500, "tests/docs"),
    Suite("contract", "dev", 700, "tests/contract", alone=True),
    Suite("integration", "dev", 900, "tests/integration", alone=True),
    Suite("hostile", "reward", 400, "tests/hostile", alone=True),
    Suite("chaos", "dev", 400, "tests/chaos", alone=True),
    Suite("attacks", "dev", 400, "tests/attacks", alone=True),
    Suite("resume", "dev", 400, "tests/resume", alone=True),
    Suite("upgrade", "dev", 600, "tests/upgrade", alone=True),
    Suite("hosts", "dev", 600, "tests/hosts", alone=True),
    Suite("learning", "dev", 600, "tests/learning", alone=True),
    Suite("mutations", "dev", 60, "tests/mutations"),
)


def choose(wanted: list[str]) -> list[Suite]:
    """The suites of these names, or those that these tests (`PATH[::NAME]`) belong to; all where nothing is named.

    Raises ValueError where there is no such suite or test file.
    """
    if not wanted:
        return [suite for suite in SUITES if suite.exists]
    chosen: dict[str, Suite] = {}
    for name in wanted:
        suite = suite_of(name)
        if suite.name != name:
            suite = replace(suite, tests=(*chosen.get(suite.name, suite).tests, name))
        chosen[suite.name] = suite
    return [chosen[suite.name] for suite in SUITES if suite.name in chosen]


def suite_of(name: str) -> Suite:
    """The suite of this name, or the one whose folder this test is in."""
    file = Path(name.partition("::")[0])
    for suite in SUITES:
        if suite.name == name:
            return suite
        if suite.folder and file.is_relative_to(suite.folder):
            if not (ROOT / file).exists():
                raise ValueError(f"there is no {file}")
            return suite
    names = ", ".join(suite.name for suite in SUITES)
    raise ValueError(f"'{name}' is neither a test (path::name) nor a suite; suites are {names}")
