"""The test suites of this checkout: commands or folders, environments and time limits."""

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Suite:
    """A list of commands (`commands`), or all or some (`tests`) of the tests of a folder (`folder`)."""

    name: str
    environment: str
    limit: float  # seconds, several times its duration on two cores; suites with long limits are started first
    folder: str = ""
    commands: tuple[tuple[str, ...], ...] = ()
    tests: tuple[str, ...] = ()  # pytest's paths and ids
    alone: bool = False  # starts nothing of another environment
    quick: str = ""  # `make check` runs test_WORD.py for each of these words: tests that start no engine or service

    @property
    def exists(self) -> bool:
        return not self.folder or (ROOT / self.folder).is_dir()


def buf_breaking() -> tuple[tuple[str, ...], ...]:
    """Return the commands that compare the protos with each released descriptor image."""
    images = sorted((ROOT / "protos" / "released").glob("*.binpb"))
    return tuple(("buf", "breaking", "protos", "--against", str(image.relative_to(ROOT))) for image in images)


# Packages that the development environment lacks (torch, vLLM, ColossalAI) have type Any.
TYPED = (
    "services/common/quartet_common",
    "services/common/quartet_server",
    "services/broker/quartet_broker",
    "services/environment/quartet_environment",
    "services/reward/quartet_reward",
    "services/rollout/quartet_rollout",
    "services/trainer/quartet_trainer",
    "client/quartet_client",
    "tests/contract/suite/quartet_contract",
    "deploy/local/quartet_local",
)

SUITES = (
    Suite(
        "lint",
        "dev",
        300,
        alone=True,
        commands=(
            ("ruff", "check", "."),
            ("ruff", "format", "--check", "."),
            ("python", "tests/imports.py"),
            ("mypy", *TYPED),
        ),
    ),
    Suite(
        "protos",
        "dev",
        100,
        alone=True,
        commands=(("buf", "lint", "protos"), ("buf", "format", "--diff", "--exit-code", "protos"), *buf_breaking()),
    ),
    Suite(
        "common",
        "dev",
        200,
        "services/common/tests",
        alone=True,
        quick="config host ledger log metrics model_folder outage ports tensors",
    ),
    Suite(
        "broker", "broker", 900, "services/broker/tests", alone=True, quick="config experience_codec wait_queue history"
    ),
    Suite(
        "reward",
        "reward",
        600,
        "services/reward/tests",
        alone=True,
        quick="fair_queue final_answer math_compare math_equality rationals reading verifiers",
    ),
    Suite("reward-model", "reward-model", 400, "services/reward/tests_reward_model", alone=True),
    Suite("environment", "environment", 450, "services/environment/tests", alone=True, quick="seats"),
    Suite("environment-openenv", "environment-openenv", 400, "services/environment/tests_openenv", alone=True),
    Suite("environment-packages", "environment-packages", 480, "services/environment/tests_packages", alone=True),
    Suite("rollout", "rollout", 1200, "services/rollout/tests", alone=True, quick="texts schedules"),
    Suite(
        "trainer",
        "trainer",
        1200,
        "services/trainer/tests",
        alone=True,
        quick="losses records schedule",
    ),
    Suite("client", "client", 600, "client/tests", quick="audit certs colossalchat data progress terminal"),
    Suite("launcher", "dev", 1200, "deploy/local/tests", quick="process supervisor"),
    Suite("deploy", "dev", 590, "tests/deploy", quick="containers observability"),
    Suite("docs", "dev", 600, "tests/docs", quick="links names references"),
    Suite("contract", "dev", 900, "tests/contract", quick="protos"),
    Suite("integration", "dev", 1200, "tests/integration"),
    Suite("families", "dev", 500, "tests/families"),
    Suite("hostile", "reward", 500, "tests/hostile", alone=True),
    Suite("chaos", "dev", 900, "tests/chaos"),
    Suite("attacks", "dev", 400, "tests/attacks"),
    Suite("resume", "dev", 500, "tests/resume"),
    Suite("upgrade", "dev", 550, "tests/upgrade"),
    Suite("hosts", "dev", 400, "tests/hosts"),
    Suite("learning", "dev", 600, "tests/learning", quick="curves"),
    Suite("gpu", "dev", 600, "tests/gpu"),
    Suite("mutations", "dev", 100, "tests/mutations", alone=True, quick="patches"),
)


def choose(wanted: list[str]) -> list[Suite]:
    """Return the suites of these names and of these tests (`PATH[::NAME]`); all if nothing is named.

    Raises ValueError if there is no such suite or test file.
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
    """Return the suite with this name, or that of this test."""
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


def quick(suites: list[Suite]) -> list[Suite]:
    """Return the suites reduced to their quick tests, those changed since the main branch first."""
    changed = changed_files()

    def is_changed(suite: Suite) -> bool:
        folder = Path(suite.folder)
        return any(file.is_relative_to(folder.parent if folder.name == "tests" else folder) for file in changed)

    chosen = [replace(suite, tests=quick_files(suite)) for suite in suites if suite.quick or suite.commands]
    return sorted(chosen, key=lambda suite: (bool(suite.folder), not is_changed(suite)))


def quick_files(suite: Suite) -> tuple[str, ...]:
    """Return the test files that `quick` names. Raises ValueError if one is missing."""
    files = {word: sorted((ROOT / suite.folder).rglob(f"test_{word}.py")) for word in suite.quick.split()}
    for word, found in files.items():
        if not found:
            raise ValueError(f"tests/suites.py: the quick test_{word}.py is not in {suite.folder}")
    return tuple(str(file.relative_to(ROOT)) for found in files.values() for file in found)


def changed_files() -> list[Path]:
    """Return the files changed since this branch left the main one; none without git or that branch."""
    names: set[str] = set()
    for command in (
        ("diff", "--name-only", "HEAD"),
        ("ls-files", "--others", "--exclude-standard"),
        ("diff", "--name-only", "main...HEAD"),
    ):
        names |= set(subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.splitlines())
    return [Path(name) for name in names]


def environments(suites: list[Suite]) -> list[str]:
    """Return the environments that suites need, that of this program first; none: all."""
    if not all(suite.alone for suite in suites):
        return []
    return list(dict.fromkeys(["dev", *(suite.environment for suite in suites)]))


if __name__ == "__main__":
    try:
        if sys.argv[1:] == ["--quick"]:  # their tests start no other environment
            print(*dict.fromkeys(["dev", *(suite.environment for suite in quick(list(SUITES)))]))
        else:
            print(*environments(choose(sys.argv[1:])))
    except ValueError as error:
        sys.exit(str(error))
