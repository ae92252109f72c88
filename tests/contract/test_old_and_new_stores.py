"""Rollouts of a release in weight groups of today's trainer, beside today's: its store opens for them, if it may.

The other way about, today's rollout in a group of a trainer that has no gate, is in `test_released_builds.py`.
"""

import socket

import elastic
import pytest
from release import RELEASES, unpack

from quartet_common.store_gate import GateError, StoreClient

pytestmark = pytest.mark.timeout(400)


def publish(pool: elastic.Pool, version: int) -> dict:
    pool.trainer.tell(do="publish", version=version)
    return pool.trainer.hear()


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
def test_a_released_rollout_joins_where_it_may_and_is_named_where_not(tmp_path, monkeypatch, release):
    monkeypatch.setattr(elastic, "ROLLOUTS", 1)
    pool = elastic.Pool(tmp_path, "gloo")
    try:
        pool.start(prompts=1)
        log = tmp_path / "elastic_trainer.log"
        answer = publish(pool, 1)
        assert answer["rollouts"] == 1 and not answer["failures"]
        stranger_is_put_out(pool)
        assert "weight store is open" not in log.read_text()

        pool.environment = unpack(release, tmp_path / "release")
        pool.add()
        pool.wait_for_members(2)
        answer = publish(pool, 2)
        assert answer["rollouts"] == 2 and not answer["failures"]
        assert "weight store is open to all who reach it, for older rollouts" in log.read_text()

        pool.trainer.close()
        pool.start_trainer(allow_open_store=False)
        pool.wait_for_members(2)
        answer = publish(pool, 3)
        assert answer["rollouts"] == 1
        assert any("lacks" in each and "weights.store_gate" in each for each in answer["failures"])
        stranger_is_put_out(pool)
    finally:
        pool.close()
