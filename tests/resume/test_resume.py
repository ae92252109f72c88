"""A trainer that is killed goes on as if it had not been: the short form of tests/resume/run.py."""

from pathlib import Path

import producer
import pytest
import resume

STEPS, KILLS, SEED = 6, 3, 5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_trainer_ends_with_the_weights_of_one_that_was_not(tmp_path: Path):
    """Though it gets groups too that cannot be trained: they are dropped, and accounted for."""
    trainers = resume.Trainers(tmp_path)
    try:
        unkilled = resume.train(tmp_path / "unkilled", trainers, STEPS, [])
        killed = resume.train(tmp_path / "killed", trainers, STEPS, resume.draw(SEED, STEPS, KILLS), invalid=True)
    finally:
        trainers.close()
    right, text = resume.main_summary(killed, unkilled, STEPS)
    assert right, text
    assert killed.audit["dropped"] == len(producer.INVALID)
    for name, reason in (
        ("cut_off", "Error parsing message with type 'quartet.v1.GroupTensors'"),
        ("unreadable", "Error parsing message with type 'quartet.v1.GroupTranscript'"),
        ("infinite", "rewards has values that are not finite"),
        ("foreign", "completion_token_ids has ids from 18 to 128; this model's are 0 to 127"),
    ):
        assert killed.dropped[f"invalid/{name}"].startswith(f"invalid group of producer: {reason}")
    assert killed.lives == KILLS + 1 and sum(killed.killed.values()) == KILLS


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_redis_of_an_older_state_beside_a_newer_checkpoint_trains_nothing_twice(tmp_path: Path):
    """The trainer lives when Redis is put back; it is refused, and its next life settles its ledger first."""
    trainers = resume.Trainers(tmp_path)
    try:
        left = resume.train(tmp_path / "restored", trainers, 12, [], restore=resume.Restore(taken_at=2, back_at=9))
    finally:
        trainers.close()
    assert not resume.wrong(left, 12)
    log = trainers.log.read_text()
    assert left.lives == 2 and "Redis was restored from an earlier state, or lost the end of its log" in log, log


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_backup_of_redis_and_then_of_the_checkpoints_is_gone_on_from(tmp_path: Path):
    trainers = resume.Trainers(tmp_path)
    restore = resume.Restore(taken_at=3, back_at=8, all=True)
    try:
        left = resume.train(tmp_path / "restored", trainers, 12, [], restore=restore)
    finally:
        trainers.close()
    assert not resume.wrong(left, 12)


def test_kills_come_in_order_and_every_second_in_mid_checkpoint():
    kills = resume.draw(1, 40, 20)
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)
    assert sum(kill.in_checkpoint for kill in kills) == 10
    assert kills == resume.draw(1, 40, 20)
