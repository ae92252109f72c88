"""Rollouts that die in mid-broadcast, hang and join while a run goes on. `elastic.py` is the long form."""

import elastic
import pytest

pytestmark = pytest.mark.timeout(600)


def test_a_run_goes_on_while_rollouts_die_hang_and_join(tmp_path):
    outcome = elastic.run(tmp_path, elastic.Schedule(updates=4, kills=1, stops=1, adds=1))
    assert (outcome.killed, outcome.stopped, outcome.added) == (1, 1, 1)
    assert outcome.failures, "nobody noticed"
    assert sorted(outcome.trained) == sorted({f"p{index}" for index in range(4 * elastic.GROUPS_PER_STEP)})
    assert max(outcome.publish_seconds) < elastic.DEADLINE_SECONDS + 5
    assert len(outcome.versions) == 3 and set(outcome.versions.values()) == {4}
