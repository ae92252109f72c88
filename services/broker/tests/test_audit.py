"""AuditRun: nothing is found in the books of a healthy run, and whatever is not as it should be is found and named."""

import random
import re

import grpc
import pytest
from conftest import on_both
from quartet.v1 import broker_pb2 as pb
from world import EVALUATE, SERVE, World, group, refused

from quartet_broker import keys


async def audit(world) -> tuple[dict[str, tuple[str, int]], pb.AuditSummary]:
    """State and step of every training instance, and the summary."""
    call = world.stub.AuditRun(pb.AuditRunRequest(run_id=world.run_id), timeout=120)
    *pages, end = [part async for part in call]
    assert end.HasField("summary") and all(part.HasField("page") for part in pages)
    records = [record for part in pages for record in part.page.instances]
    places = {
        record.instance_id: (pb.GroupState.Name(record.state).removeprefix("GROUP_STATE_"), record.step)
        for record in records
    }
    assert len(places) == len(records), "an instance came twice"
    assert end.summary.run == await world.run()
    return places, end.summary


async def healthy(world) -> dict[str, tuple[str, int]]:
    """Where all instances are, in a run whose books must be right."""
    places, summary = await audit(world)
    assert list(summary.faults) == []
    assert summary.recounted == summary.run.stats
    return places


async def faults(world) -> list[str]:
    return list((await audit(world))[1].faults)


@on_both
async def test_a_healthy_run_is_right_in_every_state(world):
    await world.create(groups_per_step=2, max_staleness=0, max_deliveries=1)
    assert await healthy(world) == {}
    await world.submit(*"abcdefgh")
    await world.submit("s1", "s2", purpose=SERVE)
    await world.submit("e1", "e2", purpose=EVALUATE, evaluation_set="heldout")
    await world.start_evaluation(0)
    assert await healthy(world) == dict.fromkeys("abcdefgh", ("QUEUED", -1))
    pinned = await world.lease(2)
    assert {lease.instance.purpose for lease in pinned} == {EVALUATE}
    await healthy(world)
    assert await world.put(group(pinned[0])) == ["ACCEPTED"]
    await world.release(pinned[1].lease_id, "broken", permanent=True)
    (served, _, *_) = await world.lease(2)
    assert served.instance.purpose == SERVE
    places = await healthy(world)
    assert places.keys() == set("abcdefgh"), "only training instances are listed"
    first, second = await world.lease()
    assert (await healthy(world))["a"] == ("LEASED", -1)
    await world.put(group(first))
    await world.release(second.lease_id, "broken", permanent=True)
    places = await healthy(world)
    assert (places["a"], places["b"]) == (("READY", -1), ("DEAD", -1))
    await world.roll_out(1)
    await world.open()
    assert await world.batch(0) == ["a", "c"]
    assert (await healthy(world))["a"] == ("LEASED_TO_TRAINER", 0)
    await world.drop(0, "a")
    assert (await healthy(world))["a"] == ("DROPPED", 0)
    await world.roll_out(1)
    assert await world.batch(0) == ["c", "d"]
    await world.trained(0)
    assert (await healthy(world))["c"] == ("TRAINED", 0)
    await world.open(checkpoint=0)
    assert (await healthy(world))["c"] == ("LEASED_TO_TRAINER", 0)
    await world.train(0)
    await world.commit(1)
    assert (await healthy(world))["c"] == ("COMMITTED", 0)
    await world.requeue_dead()
    assert (await healthy(world))["b"] == ("QUEUED", -1)
    await world.finish()
    places = await healthy(world)
    assert sorted(places.values()) == [("COMMITTED", 0)] * 2 + [("DROPPED", 0)] + [("QUEUED", -1)] * 5


@on_both
async def test_what_a_checkpoint_settled_is_right_wherever_it_was(world):
    await world.create(groups_per_step=2, max_staleness=4)
    await world.submit(*"abcdefgh")
    await world.open()
    await world.roll_out(6)
    await world.train(0)
    await world.batch(1)
    lease = (await world.lease(1))[0]
    assert lease.instance.instance_id == "g"
    # In a trained batch, in a granted one, ready, leased, queued, never seen.
    await world.open(checkpoint=1, consumed=["a", "b", "c", "e", "g", "h", "unheard"])
    places = await healthy(world)
    assert {name for name, (state, _) in places.items() if state != "COMMITTED"} == {"d", "f"}
    assert await world.batch(1) == ["d", "f"]
    await healthy(world)


async def test_half_of_a_trained_batch_settled_by_the_guard_leaves_right_books(world):
    await world.create(groups_per_step=2, max_staleness=4)
    await world.submit(*"abcd")
    await world.open()
    await world.roll_out(4)
    for step in range(2):
        await world.train(step)
    await world.open(checkpoint=1, consumed=["a"])
    assert (await healthy(world))["b"] == ("COMMITTED", 0)
    # A batch that is in the checkpoint, but not as it stands here: what is not named is not in the weights.
    await world.open(checkpoint=2, consumed=["a", "c"])
    states = {name: state for name, (state, _) in (await healthy(world)).items()}
    assert states == dict.fromkeys("abc", "COMMITTED") | {"d": "QUEUED"}


@pytest.mark.parametrize("seed", range(3))
async def test_a_healthy_run_stays_right_whatever_is_done(world, seed):
    """A walk through calls that are good, late or refused; the books are checked on the way."""
    chance = random.Random(seed)
    await world.create(groups_per_step=2, max_staleness=2, max_deliveries=2, partial_batch=1 + seed % 2)
    await world.open()
    leases, names, step, committed, version = [], 0, 0, 0, 0
    for turn in range(150):
        match chance.randrange(9):
            case 0:
                fresh = [f"pass-{names // 20}/{names + n}" for n in range(chance.randrange(1, 5))]
                await world.submit(*fresh, data_pass=names // 20)
                names += len(fresh)
            case 1:
                leases += await world.lease(chance.randrange(1, 4), version)
            case 2 if leases:
                await world.put(group(leases.pop(chance.randrange(len(leases))), chance.randrange(version + 1)))
            case 3 if leases:
                await world.release(leases.pop().lease_id, chance.choice(["", "broken"]), chance.random() < 0.2)
            case 4:
                manifest, _ = await world.take(step)
                if manifest.granted:
                    step, version = step + 1, await world.trained(step)
            case 5:
                manifest, _ = await world.take(step)
                if manifest.granted and chance.random() < 0.5:
                    await world.drop(step, manifest.instance_ids[0])
            case 6 if chance.random() < 0.3:
                await world.commit(step)
                committed = step
            case 7 if chance.random() < 0.2:
                step = version = chance.randrange(committed, step + 1)
                await world.open(checkpoint=step)
                committed = step
            case 8 if chance.random() < 0.3:
                await world.expire_leases()
        if turn % 10 == 9:
            await healthy(world)
    await world.end_prompts()
    for _ in range(3):
        await world.roll_out(version=version)
        manifest, _ = await world.take(step)
        if manifest.granted:
            step, version = step + 1, await world.trained(step)
    await healthy(world)


async def test_every_instance_is_in_one_page(world):
    await world.create(groups_per_step=700, max_staleness=0, max_queued_prompts=10_000)
    names = [f"pass-0/{n}" for n in range(2_500)]
    for start in range(0, len(names), 500):
        await world.submit(*names[start : start + 500])
    for _ in range(4):
        await world.roll_out(175)
    await world.open()
    await world.train(0)
    await world.commit(1)
    places = await healthy(world)
    assert places.keys() == set(names)
    assert sum(state == "COMMITTED" for state, _ in places.values()) == 700


async def test_data_passes_are_told(world):
    await world.create(groups_per_step=1)
    await world.submit("pass-3/0", "pass-3/1", data_pass=3)
    await world.open()
    await world.roll_out(1)
    await world.train(0)
    await world.commit(1)
    call = world.stub.AuditRun(pb.AuditRunRequest(run_id=world.run_id))
    records = [record async for part in call for record in part.page.instances]
    assert sorted((r.instance_id, r.state, r.attempt, r.step, r.data_pass) for r in records) == [
        ("pass-3/0", pb.GROUP_STATE_COMMITTED, 1, 0, 3),
        ("pass-3/1", pb.GROUP_STATE_QUEUED, 0, -1, 3),
    ]


async def test_a_run_that_is_not_there_is_not_found(world):
    await refused(audit(world), grpc.StatusCode.NOT_FOUND)


async def test_the_audit_of_one_run_does_not_see_another(world, broker):
    await world.create()
    await world.submit("a")
    other = World(world.stub, world.redis, world.run_id + "-and-more")
    await other.create()
    await other.submit("x", "y")
    assert (await healthy(world)).keys() == {"a"}
    assert (await healthy(other)).keys() == {"x", "y"}


# Tampering ------------------------------------------------------------------------------------------------------------


class Hand:
    """Someone's hand in the Redis of a run with an instance in every state.

    m and n are committed with step 0; t and u are in the batch of step 1, which is trained; b and c in that of step 2,
    which is granted; r is ready, d dead, l leased, q queued.
    """

    def __init__(self, world):
        self.world = world
        self.redis = world.redis

    def key(self, name: str) -> str:
        return keys.prefix(self.world.run_id) + name

    async def arrange(self) -> None:
        world = self.world
        await world.create(groups_per_step=2, max_staleness=8)
        await world.open()
        await world.submit(*"mntubcrdl", "q")
        await world.roll_out(7)
        for step in range(2):
            await world.train(step)
        await world.commit(1)
        await world.batch(2)
        dead, leased = await world.lease(2, version=2)
        await world.release(dead.lease_id, "no", permanent=True)
        self.lease = leased.lease_id
        assert {name: place for name, (place, _) in (await healthy(world)).items()} == dict(
            zip(
                "mntubcrdlq",
                ["COMMITTED"] * 2 + ["TRAINED"] * 2 + ["LEASED_TO_TRAINER"] * 2 + ["READY", "DEAD", "LEASED", "QUEUED"],
                strict=True,
            )
        )

    async def field(self, name: str, field: str) -> str:
        return (await self.redis.hget(self.key(f"i:{name}"), field)).decode()


async def _miscount(hand, name="queued"):
    await hand.redis.hincrby(hand.key("stats"), name, 1)


async def _lose(hand, name):
    await hand.redis.delete(hand.key(f"i:{name}"))


async def _second_ticket(hand, stream, name):
    await hand.redis.xadd(hand.key(stream), {"i": name})


async def _lose_ticket(hand, name):
    await hand.redis.xdel(hand.key(await hand.field(name, "stream")), await hand.field(name, "ticket"))


async def _state(hand, name, state):
    await hand.redis.hset(hand.key(f"i:{name}"), "state", state)


async def _orphan(hand):
    await hand.redis.hset(
        hand.key("i:orphan"), mapping={"state": "QUEUED", "purpose": "TRAIN", "attempt": 0, "prompt": "", "digest": "x"}
    )


async def _deliver_behind_the_back(hand):
    await hand.redis.xreadgroup("rollouts", "lease", {hand.key("prompts:train"): ">"}, count=1)


async def _rewind_cursor(hand):
    await hand.redis.xgroup_setid(hand.key("prompts:train"), "rollouts", "0")


async def _new_batch(hand):
    await hand.redis.rpush(hand.key("batch:7"), "r")


TAMPERINGS = {
    "a gauge": (_miscount, r"queued: the broker counts 2, there are 1"),
    "another gauge": (lambda hand: _miscount(hand, "trained"), r"trained: the broker counts 3, there are 2"),
    "the outside gauge": (
        lambda hand: _miscount(hand, "untrained_in_flight"),
        r"untrained_in_flight: the broker counts 1, there are 0",
    ),
    "the bytes": (lambda hand: _miscount(hand, "experience_bytes"), r"experience_bytes: the broker counts"),
    "the open bytes": (lambda hand: _miscount(hand, "open_bytes"), r"open_bytes: the broker counts"),
    "the committed": (
        lambda hand: _miscount(hand, "committed"),
        r"the broker counts 3 groups committed or dropped; 2 of them are remembered and 0 forgotten",
    ),
    "a committed line too many": (
        lambda hand: hand.redis.hset(hand.key("settled"), "x", "COMMITTED|d|1|0|0"),
        r"committed: the broker counts 2, 3 are remembered as such",
    ),
    "a settled line that is none": (
        lambda hand: hand.redis.hset(hand.key("settled"), "x", "COMMITTED|soon"),
        r"x is settled as 'COMMITTED\|soon', which means nothing",
    ),
    "a group's size": (
        lambda hand: hand.redis.hset(hand.key("i:r"), "bytes", 5),
        r"r has \d+ bytes, but says \d+",
    ),
    "a group of nobody": (
        lambda hand: hand.redis.set(hand.key("payload:nobody"), b"x"),
        r"a group is stored as nobody, but is no instance's",
    ),
    "a lease of nobody": (
        lambda hand: hand.redis.zadd(hand.key("leases"), {"nonce-4:ghost": 2**42}),
        r"the lease nonce-4:ghost is of ghost, which is not there",
    ),
    "a lease not held": (
        lambda hand: hand.redis.zadd(hand.key("leases"), {"nonce-4:r": 2**42}),
        r"the lease nonce-4:r is of r, which is READY without it",
    ),
    "a lease that is no lease": (
        lambda hand: hand.redis.zadd(hand.key("leases"), {"nonsense": 2**42}),
        r"the lease nonsense names no instance",
    ),
    "a lost lease": (lambda hand: hand.redis.zrem(hand.key("leases"), hand.lease), r"l is LEASED without a lease"),
    "a lost queued instance": (lambda hand: _lose(hand, "q"), r"a ticket in prompts:train names q, which is not there"),
    "a lost ready group": (lambda hand: _lose(hand, "r"), r"a ticket in ready:\d+ names r, which is not there"),
    "a lost group of a batch": (lambda hand: _lose(hand, "b"), r"the batch of step 2 names b, which is not there"),
    "a lost leased instance": (lambda hand: _lose(hand, "l"), r"the lease .*:l is of l, which is not there"),
    "a lost dead prompt": (lambda hand: _lose(hand, "d"), r"d is among the dead, but is not there"),
    "a lost ticket": (
        lambda hand: _lose_ticket(hand, "q"),
        r"q is QUEUED, but no ticket of it stands in prompts:train",
    ),
    "a lost ticket of a lease": (lambda hand: _lose_ticket(hand, "l"), r"l is LEASED, but no ticket of it stands in"),
    "a lost ready ticket": (lambda hand: _lose_ticket(hand, "r"), r"r is READY, but no ticket of it stands in ready:"),
    "a second ticket": (
        lambda hand: _second_ticket(hand, "prompts:again", "q"),
        r"a ticket in prompts:again names q, which is QUEUED with another ticket or none",
    ),
    "a second ready ticket": (
        lambda hand: _second_ticket(hand, "ready:2", "b"),
        r"a ticket in ready:2 names b, which is LEASED_TO_TRAINER with another ticket or none",
    ),
    "ready groups that no list names": (
        lambda hand: hand.redis.delete(hand.key("ready")),
        r"no list names ready:\d+: its groups reach no batch",
    ),
    "a stream without group": (
        lambda hand: hand.redis.xgroup_destroy(hand.key("prompts:train"), "rollouts"),
        r"prompts:train has no consumer group",
    ),
    "a ticket delivered to nobody": (_deliver_behind_the_back, r"q is QUEUED, but its ticket was delivered"),
    "a cursor set back": (_rewind_cursor, r"l is LEASED, but its ticket waits to be delivered"),
    "an instance nobody names": (_orphan, r"orphan is QUEUED, but no ticket of it stands in any stream"),
    "a group out of its batch": (
        lambda hand: hand.redis.lrem(hand.key("batch:2"), 0, "b"),
        r"b is LEASED_TO_TRAINER, but in no batch",
    ),
    "a group in two batches": (
        lambda hand: hand.redis.rpush(hand.key("batch:1"), "b"),
        r"b is in two batches, of steps (1 and 2|2 and 1)",
    ),
    "a group twice in a batch": (
        lambda hand: hand.redis.rpush(hand.key("batch:2"), "b"),
        r"b is in two batches, of steps 2 and 2",
    ),
    "a group of another step": (
        lambda hand: hand.redis.hset(hand.key("i:b"), "step", 9),
        r"the batch of step 2 names b, which is of step 9",
    ),
    "a ready group in a batch": (
        lambda hand: hand.redis.rpush(hand.key("batch:2"), "r"),
        r"the batch of step 2 names r, which is READY",
    ),
    "a batch without state": (_new_batch, r"the batch of step 7 has 1 groups and no state"),
    "a lost batch": (lambda hand: hand.redis.delete(hand.key("batch:2")), r"b is LEASED_TO_TRAINER, but in no batch"),
    "a batch's bytes": (
        lambda hand: hand.redis.hincrby(hand.key("batches:bytes"), "2", 1),
        r"the batch of step 2 has \d+ bytes, but says \d+",
    ),
    "a batch of a committed step": (
        lambda hand: hand.redis.hset(hand.key("batches"), "0", "TRAINED"),
        r"the batch of step 0 is kept, though steps below 1 are committed",
    ),
    "a batch trained too early": (
        lambda hand: hand.redis.hset(hand.key("batches"), "2", "TRAINED"),
        r"the batch of step 2 is TRAINED, but the policy version is 2",
    ),
    "a batch trained and taken back": (
        lambda hand: hand.redis.hset(hand.key("batches"), "1", "GRANTED"),
        r"the batch of step 1 is not TRAINED, but the policy version is 2",
    ),
    "a dead prompt not listed": (
        lambda hand: hand.redis.zrem(hand.key("dead"), "d"),
        r"d is DEAD, but not among the dead",
    ),
    "a living one listed as dead": (
        lambda hand: hand.redis.zadd(hand.key("dead"), {"q": 1}),
        r"q is among the dead, but is QUEUED",
    ),
    "settled and alive": (
        lambda hand: hand.redis.hset(hand.key("settled"), "q", "COMMITTED|d|1|0|0"),
        r"q is settled and QUEUED at once",
    ),
    "a state there is not": (lambda hand: _state(hand, "q", "LIMBO"), r"q has the state LIMBO, which there is not"),
    "a state that jumped": (
        lambda hand: _state(hand, "q", "READY"),
        r"q is READY, but its ticket stands in prompts:train",
    ),
    "a lost state": (lambda hand: hand.redis.hdel(hand.key("i:q"), "state"), r"q has no state"),
    "an instance in another pass": (
        lambda hand: hand.redis.hset(hand.key("i:q"), "pass", 5),
        r"instances alive of data pass 5: the broker counts 0, there are 1",
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
async def test_what_is_not_as_it_should_be_is_found(world, name):
    tamper, said = TAMPERINGS[name]
    hand = Hand(world)
    await hand.arrange()
    await tamper(hand)
    found = await faults(world)
    assert any(re.search(said, fault) for fault in found), found


async def test_a_great_many_faults_are_summed_up(world):
    await world.create(max_queued_prompts=2_000)
    await world.submit(*(f"a{n}" for n in range(300)))
    await world.redis.delete(keys.prefix(world.run_id) + "prompts:train")
    found = await faults(world)
    assert len(found) == 201 and found[-1] == "and 100 more of these"
