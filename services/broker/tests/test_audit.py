"""AuditRun: nothing is found in the books of a healthy run, and whatever is not as it should be is found and named."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest
from quartet.v1 import broker_pb2 as pb

from quartet_broker import keys


async def audit(world) -> tuple[dict[str, pb.InstanceRecord], pb.AuditSummary]:
    """The record of every training instance, and the summary."""
    call = world.call("AuditRun")
    *pages, end = [part async for part in call]
    assert end.HasField("summary") and all(part.HasField("page") for part in pages)
    records = [record for part in pages for record in part.page.instances]
    found = {record.instance_id: record for record in records}
    assert len(found) == len(records), "an instance came twice"
    assert end.summary.run == await world.run()
    return found, end.summary


async def healthy(world) -> dict[str, tuple[str, int]]:
    """State and step of all training instances, in a run whose books must be right."""
    records, summary = await audit(world)
    assert list(summary.faults) == []
    assert summary.recounted == summary.run.stats
    return {
        name: (pb.GroupState.Name(record.state).removeprefix("GROUP_STATE_"), record.step)
        for name, record in records.items()
    }


async def test_every_instance_is_in_one_page(world):
    await world.create(groups_per_step=700, max_staleness=0, max_queued_prompts=10_000)
    names = [f"pass-3/{n}" for n in range(2_500)]
    for start in range(0, len(names), 500):
        await world.submit(*names[start : start + 500], data_pass=3)
    for _ in range(4):
        await world.generate(175)
    await world.open()
    await world.train(0)
    await world.commit(1)
    records, _ = await audit(world)
    assert records.keys() == set(names)
    assert Counter((each.state, each.attempt, each.step, each.data_pass) for each in records.values()) == {
        (pb.GROUP_STATE_COMMITTED, 1, 0, 3): 700,
        (pb.GROUP_STATE_QUEUED, 0, -1, 3): 1_800,
    }


async def an_instance_in_every_state(world) -> dict[str, SimpleNamespace]:
    """m and n are committed with step 0; t and u are in the batch of step 1, which is trained; b and c in that of step
    2, which is granted; r is ready, d dead, l leased, q queued. Returns the fields that Redis has of each.
    """
    await world.create(groups_per_step=2, max_staleness=8)
    await world.open()
    await world.submit(*"mntubcrdlq")
    await world.generate(7)
    for step in range(2):
        await world.train(step)
    await world.commit(1)
    await world.batch(2)
    dead, _ = await world.lease(2, version=2)
    await world.release(dead.lease_id, "no", permanent=True)
    granted = "LEASED_TO_TRAINER"
    states = ["COMMITTED", "COMMITTED", "TRAINED", "TRAINED", granted, granted, "READY", "DEAD", "LEASED", "QUEUED"]
    assert {name: state for name, (state, _) in (await healthy(world)).items()} == dict(
        zip("mntubcrdlq", states, strict=True)
    )
    fields = {name: await world.redis.hgetall(f"{keys.prefix(world.run_id)}i:{name}") for name in "qrl"}
    return {
        name: SimpleNamespace(**{key.decode(): value.decode(errors="replace") for key, value in found.items()})
        for name, found in fields.items()
    }


# What somebody does to Redis (@: the prefix of the keys; {q.ticket}: a field of q), and what the audit says of it.
TAMPERINGS = {
    "HINCRBY @stats queued 1": "queued: the broker counts 2, there are 1",
    "HINCRBY @stats experience_bytes 1": "experience_bytes: the broker counts",
    "HINCRBY @stats open_bytes 1": "open_bytes: the broker counts",
    "HINCRBY @stats committed 1": "counts 3 groups committed or dropped; 2 of them are stored and 0 deleted",
    "HSET @settled x COMMITTED|d|1|0|0": "committed: the broker counts 2, 3 are stored as such",
    "HSET @settled x COMMITTED|soon": r"x is settled as 'COMMITTED\|soon', which means nothing",
    "HSET @settled q COMMITTED|d|1|0|0": "q is settled and QUEUED at once",
    "HSET @i:r bytes 5": r"r has \d+ bytes, but says \d+",
    "ZADD @leases 4398046511104 nonce-4:ghost": "the lease nonce-4:ghost is of ghost, which is not there",
    "ZADD @leases 4398046511104 nonce-4:r": "the lease nonce-4:r is of r, which is READY without it",
    "ZREM @leases {l.lease}": "l is LEASED without a lease",
    "DEL @i:q": "a stream entry in prompts:train names q, which does not exist",
    "XDEL @{q.stream} {q.ticket}": "q is QUEUED, but has no stream entry in prompts:train",
    "XDEL @{r.stream} {r.ticket}": "r is READY, but has no stream entry in ready:",
    "XADD @prompts:again * i q": "a stream entry in prompts:again names q, which is QUEUED with another entry or none",
    "DEL @ready": r"no list names ready:\d+: its groups reach no batch",
    "XGROUP DESTROY @prompts:train rollouts": "prompts:train has no consumer group",
    "XREADGROUP GROUP rollouts x COUNT 1 STREAMS @prompts:train >": "q is QUEUED, but its stream entry was delivered",
    "LREM @batch:2 0 b": "b is LEASED_TO_TRAINER, but in no batch",
    "RPUSH @batch:1 b": "b is in two batches, of steps (1 and 2|2 and 1)",
    "HSET @i:b step 9": "the batch of step 2 names b, which is of step 9",
    "RPUSH @batch:2 r": "the batch of step 2 names r, which is READY",
    "RPUSH @batch:7 r": "the batch of step 7 has 1 groups and no state",
    "HINCRBY @batches:bytes 2 1": r"the batch of step 2 has \d+ bytes, but says \d+",
    "HSET @batches 0 TRAINED": "the batch of step 0 is kept, though steps below 1 are committed",
    "HSET @batches 2 TRAINED": "the batch of step 2 is TRAINED, but the policy version is 2",
    "HSET @batches 1 GRANTED": "the batch of step 1 is not TRAINED, but the policy version is 2",
    "ZREM @dead d": "d is DEAD, but not among the dead",
    "ZADD @dead 1 q": "q is among the dead, but is QUEUED",
    "HSET @i:q state READY": "q is READY, but its stream entry is in prompts:train",
    "HDEL @i:q state": "q has no state",
    "HSET @i:q pass 5": "instances alive of data pass 5: the broker counts 0, there are 1",
}


@pytest.mark.parametrize(("command", "said"), TAMPERINGS.items(), ids=TAMPERINGS)
async def test_what_is_not_as_it_should_be_is_found(world, command, said):
    fields = await an_instance_in_every_state(world)
    words = command.format(**fields).replace("@", keys.prefix(world.run_id)).split()
    await world.redis.execute_command(*words)
    found = await world.faults()
    assert any(re.search(said, fault) for fault in found), found


async def test_a_great_many_faults_are_summed_up(world):
    await world.create(max_queued_prompts=2_000)
    await world.submit(*(f"a{n}" for n in range(300)))
    await world.redis.delete(keys.prefix(world.run_id) + "prompts:train")
    found = await world.faults()
    assert len(found) == 201 and found[-1] == "and 100 more of these"
