"""Groups that were just put are sent without reading them from Redis, and are those that Redis has."""

from conftest import on_both
from world import SERVE, World, group

from quartet_broker import recent
from quartet_broker.recent import RecentGroups


async def values_read(world: World) -> int:
    return (await world.redis.info("commandstats")).get("cmdstat_mget", {"calls": 0})["calls"]


async def begin(world: World, *names: str) -> list:
    await world.create()
    await world.open()
    await world.submit(*names)
    return await world.lease()


@on_both
async def test_a_batch_is_sent_from_memory_once_then_from_redis(world):
    leases = await begin(world, "a", "b")
    await world.put(*(group(lease, size=3000) for lease in leases))
    before = await values_read(world)
    _, first = await world.take(0)
    assert await values_read(world) == before
    _, again = await world.take(0)
    assert await values_read(world) == before + 2, "payloads and transcripts"
    assert first == again and all(len(each.tensors) == 3000 and each.transcript for each in first)


async def test_a_put_with_other_groups_than_for_the_trainer_is_not_kept(world):
    leases = await begin(world, "a", "b")
    await world.submit("served", purpose=SERVE)
    leases += await world.lease()
    assert await world.put(*(group(lease) for lease in leases)) == ["ACCEPTED"] * 3
    before = await values_read(world)
    assert await world.batch(0) == ["a", "b"]
    assert await values_read(world) == before + 2


async def test_a_put_that_is_refused_in_part_is_not_kept(world):
    a, b = await begin(world, "a", "b")
    await world.put(group(a))
    assert await world.put(group(a), group(b)) == ["DUPLICATE", "ACCEPTED"]
    before = await values_read(world)
    manifest, groups = await world.take(0, most=10)
    assert list(manifest.instance_ids) == ["a", "b"] and len(groups[0]) == 2
    assert await values_read(world) == before + 2


def test_what_is_kept_is_bounded_in_bytes_and_time(monkeypatch):
    monkeypatch.setattr(recent, "_MOST_BYTES", 100)
    groups = RecentGroups()
    groups.keep("a", {b"a-0": (b"0" * 30, None), b"a-1": (b"1" * 20, b"2" * 10)})
    groups.keep("b", {b"b-0": (b"3" * 50, None)})  # with those of the first call 110 bytes
    assert groups.take(b"b-0") is None
    assert groups.take(b"a-1") == (b"1" * 20, b"2" * 10) and groups.take(b"a-1") is None
    groups.keep("c", {b"c-0": (b"4" * 50, None)})
    assert groups.take(b"c-0") is None, "one group of the first call holds its whole request in memory"
    assert groups.take(b"a-0") == (b"0" * 30, None)
    groups.keep("d", {b"d-0": (b"5" * 100, None)})
    groups.keep("e", {b"e-0": (b"6", None)})
    assert groups.take(b"e-0") is None
    monkeypatch.setattr(recent, "_MOST_SECONDS", -1.0)
    groups.keep("f", {b"f-0": (b"7" * 100, None)})
    assert groups.take(b"d-0") is None and groups.take(b"f-0") == (b"7" * 100, None)
