"""A run whose model is on the hub: checked without its weights, downloaded once before a service starts."""

import json
import sys

import pytest
from launched import ENVIRONMENTS, ROOT, preloaded_checkout

sys.path.append(str(ROOT / "tests" / "hub"))
from hub_server import HubServer  # noqa: E402

pytestmark = pytest.mark.timeout(600)


def of_the_hub(name: str, revision: str = "v1") -> list[str]:
    settings = [f"model.path={name}", f"model.revision={revision}"]
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture
def hub(model):
    with HubServer() as server:
        server.add_folder("own/demo", model, ref="v1")
        yield server


PYTHON = """#!/bin/sh
case "$*" in *quartet_common.hub*|*--dry-run*) exec {ordinary} "$@";; esac
exec {preloaded} "$@"
"""
"""The hub's address is read during imports, so only processes that do not use the hub are preloaded."""


@pytest.fixture
def start(launch, run_file, hub, pythons, tmp_path):
    """Start a launcher with the hub's address."""
    checkout = preloaded_checkout(tmp_path / "checkout", pythons)
    for name in ("rollout", "trainer"):
        folder = checkout / ".quartet" / "envs" / name / "bin"
        folder.unlink()
        folder.mkdir()
        ordinary = ENVIRONMENTS / name / "bin" / "python"
        (folder / "python").write_text(PYTHON.format(ordinary=ordinary, preloaded=pythons[name]))
        (folder / "python").chmod(0o755)

    def begin(*settings: str, command: tuple[str, ...] = ("run",), token: str = ""):
        environment = {**hub.environment(tmp_path / "home"), "HF_TOKEN": token}
        return launch(run_file, *settings, command=command, environment=environment, checkout=checkout)

    return begin


def weights(hub: HubServer) -> int:
    return sum(request.startswith("GET") and request.endswith(".safetensors") for request in hub.requests)


def test_a_dry_run_takes_all_but_the_weights_and_a_run_takes_them_once(start, hub, tmp_path):
    dry = start(*of_the_hub("own/demo"), command=("run", "--dry-run"))
    assert dry.wait(120) == 0, dry.said()
    assert weights(hub) == 0 and "GET /own/demo/resolve" in " ".join(hub.requests)
    launched = start(*of_the_hub("own/demo"))
    assert launched.wait(240) == 0, launched.said()
    assert weights(hub) == 1, "the launcher downloads them, the services get the folder"
    assert "model: own/demo, from the hub or its cache" in launched.said()
    assert json.loads((tmp_path / "run" / "model" / "config.json").read_text())["vocab_size"]
    assert 'path = "own/demo"' in (tmp_path / "run" / "run.toml").read_text()
