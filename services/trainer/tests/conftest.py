"""Helpers of this folder are imported by both halves; see `processes`."""

from pathlib import Path

import pytest
import torch
from learner_helpers import make_model
from processes import start_server

from quartet_server.host import freeze_gc_heap

torch.set_num_threads(1)


def pytest_collection_finish(session: pytest.Session) -> None:
    """The server of forks imports while the first tests run, not within one of them."""
    freeze_gc_heap()
    if len(session.items) > 50:
        start_server()


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))
