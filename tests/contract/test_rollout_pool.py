"""A pool of rollouts and the trainer's real publisher: rollouts die in mid-broadcast, hang and join, also those of a
release, and those that have a transport of another package.

The tests share one pool: each leaves its rollouts to the next.
"""

import signal
from contextlib import closing

import numpy as np
import pytest
import rollout_pool
from preloaded import install_extensions
from quartet.v1 import rollout_pb2 as pb
from release import RELEASES, unpack
from servers_under_test import Server

from quartet_common.tensors import decode
from quartet_contract import cases_rollout as cases

pytestmark = pytest.mark.timeout(600)

STOP_AT = 9  # tensors into an update, of some thirty: several buckets are on their way


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    with closing(rollout_pool.Pool(tmp_path_factory.mktemp("pool"))) as made:
        made.start()
        yield made


def version_of(rollout: Server) -> int:
    return rollout.caller().call("RolloutService.GetStatus", pb.RolloutServiceGetStatusRequest()).policy_version


def test_rollouts_that_die_or_hang_in_mid_broadcast_hold_up_nobody_and_who_lives_gets_the_version(pool):
    assert pool.trainer.publish(1)["rollouts"] == len(pool.rollouts)
    pool.trainer.give(do="publish", version=2, stop_at=STOP_AT)
    assert pool.trainer.hear() == {"sending": True}
    dead, hung, survivor = pool.rollouts
    pool.rollouts.pop(dead).signal(signal.SIGKILL)
    pool.rollouts[hung].signal(signal.SIGSTOP)
    try:
        pool.trainer.give(go=True)
        answer = pool.trainer.hear()
        assert answer["failures"]
        assert answer["seconds"] < rollout_pool.DEADLINE_SECONDS + 5, "one deadline is waited for, not one for each"
        # A survivor that took part in the failed attempt may be skipped for a second.
        pool.rollouts[survivor].wait_until(
            lambda: pool.trainer.publish(2)["rollouts"] == 1, "it has version 2", rollout_pool.DEADLINE_SECONDS
        )
    finally:
        pool.rollouts[hung].signal(signal.SIGCONT)
    late = pool.rollouts[pool.add()]

    def all_have_it() -> bool:
        pool.trainer.publish(2)  # as the training loop does while it waits
        return {version_of(each) for each in pool.rollouts.values()} == {2}

    late.wait_until(all_have_it, "all have version 2", rollout_pool.PATIENCE_SECONDS)


@pytest.mark.parametrize("release", RELEASES)
def test_a_released_rollout_joins_todays_group(pool, tmp_path, release):
    todays = len(pool.rollouts)
    pool.environment = unpack(release, tmp_path / "release")
    pool.add()
    pool.wait_for_members(todays + 1)
    answer = pool.trainer.publish(6)
    assert answer["rollouts"] == todays + 1 and not answer["failures"]


def log_probs(rollout: Server, version: int) -> np.ndarray:
    """Log-probs of a seeded completion, all of whose tokens are of this version."""
    answer = rollout.caller().call("RolloutService.Generate", pb.GenerateRequest(prompt=cases.prompt()))
    spans = [span.policy_version for one in answer.completions for span in one.info.version_spans]
    assert set(spans) == {version}
    return np.concatenate([decode(one.log_probs) for one in answer.completions])


def test_weights_go_to_the_rollout_that_has_the_transports_package_and_the_others_are_told_the_cure(
    pool, tmp_path, monkeypatch
):
    site = install_extensions(tmp_path)
    pool.environment = {"PYTHONPATH": str(site)}
    has = pool.rollouts[pool.add()]
    pool.trainer.close()
    monkeypatch.setenv("PYTHONPATH", str(site))  # the trainer's
    pool.start_trainer(transport="sockets")
    pool.wait_for_members(len(pool.rollouts))
    first = pool.trainer.publish(10)
    (refused,) = first["failures"]
    assert "the caller needs weights.sockets, which this service lacks" in refused
    assert "install the package with the entry point 'sockets' of quartet.transports" in refused
    of_10 = log_probs(has, 10)
    # pool_trainer gives every fifth version the same weights.
    again = [pool.trainer.publish(version)["rollouts"] for version in (11, 15)]
    assert [first["rollouts"], *again] == [1, 1, 1]
    np.testing.assert_allclose(log_probs(has, 15), of_10, atol=1e-5)
