"""A pool of rollouts and the trainer's real publisher: rollouts die in mid-broadcast, hang and join, also those of a
release, and those that have a transport of another package. `elastic.py` has a long form of the first test.

The tests share one pool: each leaves its rollouts to the next.
"""

import socket
import subprocess

import elastic
import numpy as np
import pytest
from quartet.v1 import rollout_pb2 as pb
from release import RELEASES, unpack
from servers_under_test import ROOT, Server

from quartet_client.contract import cases_rollout as cases
from quartet_common.store_gate import GateError, StoreClient
from quartet_common.tensors import decode

pytestmark = pytest.mark.timeout(600)

SCHEDULE = elastic.Schedule(updates=4, kills=1, stops=1, adds=1)
UV = ROOT / ".quartet" / "tools" / "bin" / "uv"
PYTHON = ROOT / ".quartet" / "envs" / "dev" / "bin" / "python"


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with elastic.started_pool(tmp_path_factory.mktemp("pool"), SCHEDULE.updates * elastic.GROUPS_PER_STEP) as made:
        yield made


def status(rollout: Server) -> pb.RolloutServiceGetStatusResponse:
    return rollout.caller().call("RolloutService.GetStatus", pb.RolloutServiceGetStatusRequest())


def test_a_run_goes_on_while_rollouts_die_hang_and_join(pool):
    outcome = elastic.ScheduledRun(pool, SCHEDULE).go()
    assert (outcome.killed, outcome.stopped, outcome.added) == (1, 1, 1)
    assert outcome.failures, "nobody noticed"
    assert sorted(outcome.trained) == sorted({f"p{index}" for index in range(4 * elastic.GROUPS_PER_STEP)})
    assert max(outcome.publish_seconds) < elastic.DEADLINE_SECONDS + 5
    assert len(outcome.versions) == 3 and set(outcome.versions.values()) == {4}


# Rollouts of a release ------------------------------------------------------------------------------------------------


def stranger_is_put_out(pool: elastic.Pool) -> None:
    """Whoever comes without the secret is told nothing, and counted."""
    pool.trainer.tell(do="store")
    before = pool.trainer.hear()
    with socket.create_connection(("127.0.0.1", before["port"]), 20) as stranger:
        stranger.sendall(bytes(64))
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            """It is closed with bytes unread."""
    with pytest.raises(GateError, match="does not let us into epoch 1"):
        StoreClient("127.0.0.1", before["port"], 1, b"a guess at secrets", 20)
    pool.trainer.tell(do="store")
    assert pool.trainer.hear()["refused"] == before["refused"] + 2


@pytest.mark.parametrize("release", RELEASES)
def test_a_released_rollout_joins_where_it_may_and_is_named_where_not(pool, tmp_path, release):
    """The trainer's store opens for it, if it may.

    The other way about, today's rollout in a group of a trainer that has no gate, is in `test_released_builds.py`.
    """
    todays = len(pool.rollouts)
    log = pool.folder / "elastic_trainer.log"
    answer = pool.trainer.publish(5)
    assert answer["rollouts"] == todays and not answer["failures"]
    stranger_is_put_out(pool)
    assert "weight store is open" not in log.read_text()

    pool.environment = unpack(release, tmp_path / "release")
    pool.add()
    pool.wait_for_members(todays + 1)
    answer = pool.trainer.publish(6)
    assert answer["rollouts"] == todays + 1 and not answer["failures"]
    assert "weight store is open to all who reach it, for older rollouts" in log.read_text()

    pool.trainer.close()
    pool.start_trainer(allow_open_store=False)
    pool.wait_for_members(todays + 1)
    answer = pool.trainer.publish(7)
    assert answer["rollouts"] == todays
    assert any("lacks" in each and "weights.store_gate" in each for each in answer["failures"])
    stranger_is_put_out(pool)


# A transport of another package: examples/extensions, installed beside the services, as docs/extend.md shows it -------


@pytest.fixture
def site(tmp_path):
    """The folder into which the package is installed."""
    subprocess.run(["cp", "-r", ROOT / "examples" / "extensions", tmp_path / "source"], check=True, timeout=60)
    install = [UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--no-build-isolation", "--python", PYTHON]
    subprocess.run([*install, "--target", tmp_path / "site", tmp_path / "source"], check=True, timeout=100)
    return tmp_path / "site"


def log_probs(rollout: Server, version: int) -> np.ndarray:
    """Log-probs of a seeded completion, all of whose tokens are of this version."""
    answer = rollout.caller().call("RolloutService.Generate", pb.GenerateRequest(prompt=cases.prompt()))
    spans = [span.policy_version for one in answer.completions for span in one.info.version_spans]
    assert set(spans) == {version}
    return np.concatenate([decode(one.log_probs) for one in answer.completions])


def test_weights_go_to_the_rollout_that_has_the_package_and_the_others_are_told_the_cure(pool, site, monkeypatch):
    lack = list(pool.rollouts.values())
    before = [status(each).policy_version for each in lack]
    pool.environment = {"PYTHONPATH": str(site)}
    has = pool.rollouts[pool.add()]
    pool.trainer.close()
    monkeypatch.setenv("PYTHONPATH", str(site))  # the trainer's
    pool.start_trainer(transport="sockets")
    pool.wait_for_members(len(pool.rollouts))
    first = pool.trainer.publish(10)
    assert first["rollouts"] == 1
    (refused,) = first["failures"]
    assert "the caller needs weights.sockets, which this service lacks" in refused
    assert "install the package with the entry point 'sockets' of quartet.transports" in refused
    of_10 = log_probs(has, 10)
    # elastic_trainer gives every fifth version the same weights.
    assert pool.trainer.publish(11)["rollouts"] == 1
    of_11 = log_probs(has, 11)
    assert of_11.shape != of_10.shape or np.abs(of_11 - of_10).max() > 1e-3, "the first weights still stand"
    assert pool.trainer.publish(15)["rollouts"] == 1
    np.testing.assert_allclose(log_probs(has, 15), of_10, atol=1e-5)
    assert status(has).policy_version == 15 and [status(each).policy_version for each in lack] == before
