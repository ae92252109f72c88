"""A run is saved from Redis while others work, and restored into servers that run: old, new, with a log or without."""

import asyncio
import json

import grpc
import pytest
from conftest import executable_of, serving
from quartet.v1 import broker_pb2 as pb
from redis.asyncio import Redis
from redis_process import RedisProcess
from world import SERVE, World, group, refused

from quartet_broker import keys
from quartet_broker.backup import main


async def call(action: str, run_id: str, folder, url: str, *more: str) -> int:
    """Run the command on a thread: it has an event loop of its own."""
    return await asyncio.to_thread(main, [action, run_id, str(folder), "--set", f'broker.redis_url="{url}"', *more])


async def dumped(redis: Redis, run_id: str) -> dict[bytes, bytes]:
    """Everything that Redis has of a run."""
    return {key: await redis.dump(key) async for key in redis.scan_iter(keys.prefix(run_id) + "*")}


@pytest.fixture(params=["redis", "valkey"])
def kind(request) -> str:
    return request.param


@pytest.fixture(params=["yes", "no"])
def fresh(request, kind, tmp_path):
    """A fresh server, with an append-only file or without."""
    folder = tmp_path / "fresh"
    folder.mkdir()
    server = RedisProcess(folder, "--appendonly", request.param, executable=executable_of(kind))
    server.keeps_log = request.param == "yes"
    server.start()
    yield server
    server.kill()


async def work(world: World) -> None:
    """Have groups of every kind: queued, leased, ready, in a batch, trained, committed, delivered, dead."""
    await world.create(max_staleness=9, max_deliveries=1, curriculum=pb.Curriculum())
    await world.submit(*(f"p{n}" for n in range(14)), source="own")
    await world.submit("shown", purpose=SERVE)
    await world.open()
    await world.generate(7)
    for step in range(2):
        await world.train(step)
    await world.commit(1)
    await world.batch(2)
    await world.generate(2, version=2)
    dying, *_ = await world.lease(3, version=2)
    await world.release(dying.lease_id, "it fell")


async def test_a_run_is_restored_into_another_server(world, redis_server, fresh, tmp_path, capsys):
    await work(world)
    assert await call("save", world.run_id, tmp_path, redis_server.url) == 0
    said = json.loads(capsys.readouterr().out)
    before = await dumped(world.redis, world.run_id)
    assert (said["policy_version"], said["committed_step"], said["keys"]) == (2, 1, len(before))
    stats = await world.stats()

    assert await call("restore", world.run_id, tmp_path, fresh.url) == 0
    if fresh.keeps_log:
        fresh.stop()
        fresh.start()
    async with Redis(port=fresh.port) as redis, serving(fresh.url) as (stub, *_):
        assert (await dumped(redis, world.run_id)).keys() == before.keys()
        restored = World(stub, redis, world.run_id)
        assert await restored.stats() == stats and not await restored.faults()
        assert (await restored.open(checkpoint=2)).run.policy_version == 2
        assert len(await restored.batch(2)) == 2 and await restored.trained(2) == 3
        assert await restored.requeue_dead() == 1
        assert [run.spec.run_id for run in (await stub.ListRuns(pb.ListRunsRequest())).runs] == [world.run_id]


async def test_books_are_of_one_moment_while_others_work(world, redis_server, admin, tmp_path):
    """Groups are stored, trained and deleted without a pause; whatever was saved meanwhile has no fault."""
    await world.create(max_staleness=9)
    await world.open()
    stop = asyncio.Event()

    async def train() -> None:
        step = 0
        while not stop.is_set():
            await world.submit(*(f"p{step}-{n}" for n in range(3)), follows=f"p{step - 1}-2" if step else "")
            leases = await world.lease(2, version=step)
            await world.put(*(group(lease, step, size=10_000) for lease in leases))
            await world.train(step)
            await world.commit(step + 1)
            step += 1

    at_work = asyncio.create_task(train())
    saved = []
    for n in range(8):
        folder = tmp_path / str(n)
        folder.mkdir()
        assert await call("save", world.run_id, folder, redis_server.url) == 0
        saved.append(folder)
    stop.set()
    await at_work
    reached = (await world.run()).policy_version
    seen = set()
    for folder in saved:
        await admin.flushdb()
        assert await call("restore", world.run_id, folder, redis_server.url) == 0
        assert not await world.faults()
        seen.add((await world.run()).policy_version)
        await world.open(checkpoint=(await world.run()).policy_version)
    assert len(seen) > 1 and max(seen) <= reached


async def test_a_run_that_redis_has_is_kept_without_replace(world, redis_server, tmp_path, capsys):
    await work(world)
    assert await call("save", world.run_id, tmp_path, redis_server.url) == 0
    await world.submit("later")
    for action in ("check", "restore"):
        assert await call(action, world.run_id, tmp_path, redis_server.url) == 2
        assert f"Redis has a run '{world.run_id}', which is active; add --replace" in capsys.readouterr().err
    assert await world.state_of("later") == "QUEUED"
    assert await call("restore", world.run_id, tmp_path, redis_server.url, "--replace") == 0
    await refused(world.call("GetGroup", instance_id="later"), grpc.StatusCode.NOT_FOUND)
    assert not await world.faults()


async def test_the_rest_of_an_interrupted_restore_is_replaced(world, redis_server, admin, tmp_path):
    await work(world)
    assert await call("save", world.run_id, tmp_path, redis_server.url) == 0
    before = await dumped(admin, world.run_id)
    await admin.delete(keys.run(world.run_id))  # written last
    await admin.set(keys.prefix(world.run_id) + "payload:orphan", b"left")
    assert await call("restore", world.run_id, tmp_path, redis_server.url) == 0
    assert (await dumped(admin, world.run_id)).keys() == before.keys()


async def test_what_cannot_be_saved_or_restored_is_a_sentence(world, redis_server, admin, tmp_path, capsys):
    await work(world)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert await call("save", "other", empty, redis_server.url) == 2
    assert f"Redis has no run 'other'; its newest runs: {world.run_id}" in capsys.readouterr().err
    assert await call("save", world.run_id, tmp_path, redis_server.url) == 0
    await admin.execute_command("ACL", "SETUSER", "quartet", "-restore")
    try:
        assert await call("restore", world.run_id, tmp_path, redis_server.url, "--replace") == 2
    finally:
        await admin.execute_command("ACL", "SETUSER", "quartet", "+restore")
    assert "its user lacks a right (NOPERM)" in capsys.readouterr().err
    assert await call("restore", world.run_id, tmp_path, redis_server.url) == 0


async def test_an_older_server_says_that_it_cannot_read_the_backup(world, redis_servers, tmp_path, capsys):
    await work(world)
    made = tmp_path / "newer"
    made.mkdir()
    newer, older = redis_servers("valkey"), redis_servers("redis")
    assert await call("save", world.run_id, made, older.url) == 0
    assert await call("restore", world.run_id, made, newer.url) == 0
    saved = tmp_path / "saved"
    saved.mkdir()
    assert await call("save", world.run_id, saved, newer.url) == 0
    capsys.readouterr()
    assert await call("restore", world.run_id, saved, older.url, "--replace") == 2
    assert "cannot read what the Redis of the backup wrote" in capsys.readouterr().err
    with newer.client() as client:
        client.flushall()
