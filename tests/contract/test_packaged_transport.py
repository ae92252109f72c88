"""Weights by a transport of another package: the trainer's real publisher, one rollout that has it, one that has not.

The package is examples/extensions, built and installed beside the services, as docs/extend.md shows it.
"""

import subprocess

import elastic
import numpy as np
import pytest
from quartet.v1 import rollout_pb2 as pb
from servers_under_test import ROOT, Server

from quartet_client.contract import cases_rollout as cases
from quartet_common.tensors import decode

pytestmark = pytest.mark.timeout(300)

UV = ROOT / ".quartet" / "tools" / "bin" / "uv"
PYTHON = ROOT / ".quartet" / "envs" / "dev" / "bin" / "python"


class Pair(elastic.Pool):
    """The first rollout has the package, the second has not."""

    def add(self) -> None:
        """Start a rollout; it is not waited for."""
        self.environment = {"PYTHONPATH": str(self.folder / "site")} if not self.rollouts else {}
        super().add()


@pytest.fixture
def pair(tmp_path, monkeypatch):
    subprocess.run(["cp", "-r", ROOT / "examples" / "extensions", tmp_path / "source"], check=True, timeout=60)
    install = [UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation", "--python", PYTHON]
    subprocess.run([*install, "--target", tmp_path / "site", tmp_path / "source"], check=True, timeout=100)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))  # the trainer's
    made = Pair(tmp_path, "sockets")
    try:
        made.start(prompts=1)
        yield made
    finally:
        made.close()


def publish(pair: Pair, version: int) -> dict:
    pair.trainer.tell(do="publish", version=version)
    return pair.trainer.hear()


def log_probs(rollout: Server, version: int) -> np.ndarray:
    """Log-probs of a seeded completion, all of whose tokens are of this version."""
    answer = rollout.caller().call("RolloutService.Generate", pb.GenerateRequest(prompt=cases.prompt()))
    spans = [span.policy_version for one in answer.completions for span in one.info.version_spans]
    assert set(spans) == {version}
    return np.concatenate([decode(one.log_probs) for one in answer.completions])


def status(rollout: Server) -> pb.RolloutServiceGetStatusResponse:
    return rollout.caller().call("RolloutService.GetStatus", pb.RolloutServiceGetStatusRequest())


def test_weights_go_to_the_rollout_that_has_the_package_and_the_other_is_told_the_cure(pair: Pair):
    has, lacks = pair.rollouts["rollout-1"], pair.rollouts["rollout-2"]
    first = publish(pair, 0)
    assert first["rollouts"] == 1
    (refused,) = first["failures"]
    assert "the caller needs weights.sockets, which this service lacks" in refused
    assert "install the package with the entry point 'sockets' of quartet.transports" in refused
    of_0 = log_probs(has, 0)
    # elastic_trainer gives every fifth version the same weights.
    assert publish(pair, 1)["rollouts"] == 1
    of_1 = log_probs(has, 1)
    assert of_1.shape != of_0.shape or np.abs(of_1 - of_0).max() > 1e-3, "the first weights still stand"
    assert publish(pair, 5)["rollouts"] == 1
    np.testing.assert_allclose(log_probs(has, 5), of_0, atol=1e-5)
    assert (status(has).policy_version, status(lacks).policy_version) == (5, -1)
    assert status(has).group_epoch > 0 > status(lacks).group_epoch
