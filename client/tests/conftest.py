"""Fixtures of the client's tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# What is forked here is another program at once; gRPC's handlers around a fork with threads can crash it before that.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

sys.path.insert(0, str(Path(__file__).parent))  # real_broker.py is beside the tests, not in a package
sys.path.insert(1, str(Path(__file__).parents[2] / "services" / "common" / "tests"))  # fake_nvidia_smi.py

from real_broker import ENVIRONMENT, RealBroker, real_broker  # noqa: E402
from small_services import small_services  # noqa: E402

from quartet_client import streams, view  # noqa: E402
from quartet_client.dashboard import server  # noqa: E402
from quartet_common.ports import free_port


@pytest.fixture(scope="session", autouse=True)
def short_intervals() -> Iterator[None]:
    """Look often, in this process: what changes is seen at once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (view, server):
            patch.setattr(module, "_ASK_SECONDS", 0.2)
            patch.setattr(module, "_DRAW_SECONDS", 0.05)
        patch.setattr(streams, "_QUIET_SECONDS", 0.3)
        yield


@pytest.fixture(scope="session")
def running_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBroker]:
    """The real broker, with the runs of the tests before."""
    if not (ENVIRONMENT / "bin" / "quartet-broker").exists():
        pytest.skip("no broker environment; make it with: python3 deploy/local/environments.py broker")
    with real_broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def broker(running_broker) -> RealBroker:
    """The real broker, without a run."""
    running_broker.forget_all_runs()
    return running_broker


@pytest.fixture
def address(broker) -> str:
    """The real broker's, which has no run."""
    return broker.address


@pytest.fixture(scope="session")
def reward_and_rollout() -> Iterator[dict[str, str]]:
    """The addresses of small ones."""
    with small_services() as addresses:
        yield addresses


@pytest.fixture
def addresses(address, reward_and_rollout) -> dict[str, str]:
    """Of all services but a trainer."""
    return {"broker": address, **reward_and_rollout}


@pytest.fixture
def nowhere() -> str:
    """An address where nothing listens."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def run_file_of(write):
    """Write a run file with so many training prompts and, as a set, held-out ones; `run`, `data`: further keys."""

    def _write(run_id: str, prompts: int, held: str, *, run: str = "", data: str = "") -> Path:
        lines = "".join(f'{{"prompt": "{i}", "gt_answer": "{i}"}}\n' for i in range(prompts))
        train, heldout = write("train.jsonl", lines), write("held.jsonl", '{"prompt": "7", "gt_answer": "7"}\n')
        sets = f"[data.evaluation]\n{held} = '{heldout}'\n"
        return write("run.toml", f"[run]\nid = '{run_id}'\n{run}\n[data]\ntrain = '{train}'\n{data}\n{sets}")

    return _write


@pytest.fixture
def write(tmp_path):
    """Write a file of the given name and text; return its path."""

    def _write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return _write
