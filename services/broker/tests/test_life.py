"""A group's life, transition by transition."""

from world import group


async def test_a_group_goes_from_submission_to_commit(world):
    await world.create()
    await world.submit("a", "b")
    assert await world.state_of("a") == "QUEUED"
    leases = await world.lease()
    assert [lease.instance.instance_id for lease in leases] == ["a", "b"]
    assert [lease.attempt for lease in leases] == [1, 1]
    assert await world.state_of("a") == "LEASED"
    assert await world.put(*map(group, leases)) == ["ACCEPTED", "ACCEPTED"]
    assert await world.state_of("a") == "READY"
    await world.open()
    assert await world.batch(0) == ["a", "b"]
    assert await world.state_of("a") == "LEASED_TO_TRAINER"
    assert await world.trained(0) == 1
    assert await world.state_of("a") == "TRAINED"
    assert await world.commit(1) == 2
    assert await world.state_of("a") == "COMMITTED"
    run = await world.run()
    assert (run.policy_version, run.committed_step) == (1, 1)
    assert (run.stats.committed, run.stats.submitted, run.stats.experience_bytes) == (2, 2, 0)
