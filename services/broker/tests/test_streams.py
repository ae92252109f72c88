"""Watchers that do not read: they cost little, others do not wait for them, and they are turned away."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import broker_pb2_grpc
from world import World, refused

from quartet_common.channel import channel_options

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
EVENT = {"notice": {"level": "info", "text": "x" * (200 << 10)}}


def unread(host) -> grpc.aio.Channel:
    """A connection of its own, whose streams take 64 KiB that nobody reads: gRPC would widen them to megabytes."""
    options = [*channel_options(), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(host.address, options=options)


def over(channel: grpc.aio.Channel, world: World) -> World:
    """The same run, through another connection."""
    return World(broker_pb2_grpc.BrokerServiceStub(channel), world.redis, world.run_id)


def resident_bytes() -> int:
    """Memory of this process, broker and watchers."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.broker(max_streams_per_peer=400)
async def test_hundreds_of_watchers_that_do_not_read_are_not_noticed(world, broker):
    async with unread(broker[2]) as channel:
        await world.create()
        for _ in range(40):
            await world.report(**EVENT)
        before = resident_bytes()
        watchers = [over(channel, world).watch() for _ in range(300)]
        for watcher in watchers:
            assert (await watcher.read()).event.HasField("run_state")
        for _ in range(20):
            await world.call("GetRun")
            await world.report(**EVENT)
        # Each has an event on the way: 60 MiB in all. The 40 that it did not read would be 2,400 MiB.
        assert resident_bytes() - before < 600 << 20
        for watcher in watchers:
            watcher.cancel()


@pytest.mark.broker(watcher_patience=0.5)
async def test_a_watcher_that_does_not_read_is_turned_away_and_can_go_on(world, broker):
    async with unread(broker[2]) as channel:
        await world.create(members=())
        slow = over(channel, world).watch()
        seen = [(await slow.read()).event.event_id]
        reader, written = world.watch(after=seen[0]), []
        for _ in range(60):
            written.append(await world.report(**EVENT))
            assert (await reader.read()).event.event_id == written[-1], "who reads gets all"
        await asyncio.sleep(1.0)  # not reading is what is tested
        with pytest.raises(grpc.RpcError) as caught:
            while True:
                seen.append((await slow.read()).event.event_id)
        assert caught.value.code() == EXHAUSTED and "took no message for 0.5 s" in caught.value.details()
        assert len(seen) < 60
        again = world.watch(after=seen[-1])
        while len(seen) <= 60:
            seen.append((await again.read()).event.event_id)
        assert seen[1:] == written, "none is lost, none comes twice"


async def test_however_many_watchers_read_the_past_others_wait_for_one_message_of_theirs(world, broker):
    passes, written = 0, []
    _, servicer, _ = broker
    await world.create(members=())
    last = [await world.report(**EVENT) for _ in range(6)][-1]

    async def read() -> None:
        async with aclosing(servicer.events.watch(pb.WatchRunRequest(run_id=world.run_id))) as events:
            async for response in events:
                written.append(passes)
                if pb.WatchRunResponse.FromString(response).event.event_id == last:
                    return

    watching = asyncio.gather(*(read() for _ in range(50)))
    while not watching.done():
        await asyncio.sleep(0)
        passes += 1
    await watching
    assert len(written) == len(set(written)) >= 300, "no two within one pass of the event loop"


@pytest.mark.broker(max_streams_per_peer=3)
async def test_a_peer_has_so_many_streams_and_no_more(world):
    await world.create()
    calls = [world.watch(), world.watch(), world.call("WatchMembers")]
    for call in calls:
        await call.read()
    for one_more in (world.watch(), world.call("AuditRun"), world.call("LeaseExperience")):
        await refused(one_more.read(), EXHAUSTED, "broker.max_streams_per_peer")
    assert (await world.run()).spec.run_id == world.run_id, "calls are not streams"
    calls[0].cancel()
    async with asyncio.timeout(10):
        while True:
            try:
                assert (await world.watch().read()).event.HasField("run_state")
                break
            except grpc.RpcError as error:
                assert error.code() == EXHAUSTED


async def test_an_event_is_read_from_redis_once_for_all_watchers(world, waiting):
    await world.create()
    watchers = [world.watch() for _ in range(50)]
    for watcher in watchers:
        for _ in range(2):  # the run, its member
            last = (await watcher.read()).event.event_id
    await waiting(50)  # each has looked for what is behind its second message
    async with world.redis.monitor() as monitor:
        new = await world.report(**EVENT)
        assert {(await watcher.read()).event.event_id for watcher in watchers} == {new}
        await world.redis.echo("all have it")
        commands = []
        async for seen in monitor.listen():
            commands.append(seen["command"])
            if "all have it" in commands[-1]:
                break
    reads = [command for command in commands if command.startswith("XRANGE") and f"({last} " in command]
    assert len(reads) == 1, reads
    for watcher in watchers:
        watcher.cancel()


async def test_a_run_made_anew_shows_none_of_the_events_of_the_one_before(world):
    await world.create()
    await world.report(**EVENT)
    await world.finish()
    assert len([answer async for answer in world.watch()]) == 4
    await world.delete()
    await world.create(members=())
    await world.finish()
    assert len([answer async for answer in world.watch()]) == 2


@pytest.mark.broker(server={"max_connection_calls": 16})
async def test_one_connection_has_so_many_calls_and_others_go_on(world, broker):
    await world.create()
    async with unread(broker[2]) as channel:
        calls = [over(channel, world).watch() for _ in range(17)]
        first_reads = {asyncio.ensure_future(call.read()): call for call in calls}
        answered: set[asyncio.Future] = set()
        while len(answered) < 16:
            answered, waiting = await asyncio.wait([*first_reads], timeout=0.1)
        assert (await world.run()).spec.run_id == world.run_id
        (last,) = waiting
        assert not last.done()
        first_reads[answered.pop()].cancel()
        assert (await last).event.HasField("run_state")
        for call in calls:
            call.cancel()
