"""Redis away, full, read-only, killed, cut off; brokers that stop."""

import asyncio
import random
from contextlib import suppress

import grpc
import pytest
from conftest import KINDS, documented_user, executable_of, serving
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import REGISTRY
from redis_process import RedisProcess
from world import group, refused, world_of

from quartet_common.channel import connect


@pytest.fixture(params=KINDS)
def own_redis(request, tmp_path):
    """A Redis for one test, that loses nothing when it is killed."""
    server = RedisProcess(tmp_path, "--appendfsync", "always", executable=executable_of(request.param))
    server.start()
    yield server
    server.kill()


async def health_becomes(host, wanted: str, service: str = "quartet.v1.BrokerService") -> None:
    status = health_pb2.HealthCheckResponse.ServingStatus.Value(wanted)
    async with asyncio.timeout(30), connect(host.address) as channel:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        while (await call.read()).status != status:
            pass
        call.cancel()


def state_of_redis() -> str:
    """Return the one state that the broker's metric says."""
    (family,) = (family for family in REGISTRY.collect() if family.name == "quartet_broker_redis")
    (state,) = (sample.labels["state"] for sample in family.samples if sample.value == 1)
    return state


async def code_of(call) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return caught.value.code()


async def again(call, *arguments, **named):
    """Call until Redis is there again; any failure but UNAVAILABLE is the test's."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call(*arguments, **named)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)  # as long as a client's first backoff


async def test_while_redis_is_away_calls_are_unavailable_and_then_go_on(own_redis):
    async with serving(own_redis.url, redis_timeout=2.0) as (stub, servicer, host):
        world = await world_of(stub, servicer, "away")
        await world.create()
        await world.submit("a")
        (lease,) = await world.lease()
        waiting = asyncio.create_task(world.ask(wait=20))
        own_redis.kill()
        await health_becomes(host, "NOT_SERVING")
        assert await code_of(world.put(group(lease))) == grpc.StatusCode.UNAVAILABLE
        assert await code_of(world.ask()) == grpc.StatusCode.UNAVAILABLE
        assert state_of_redis() == "away"
        own_redis.start()
        await health_becomes(host, "SERVING")
        assert state_of_redis() == "ok"
        assert await world.put(group(lease)) == ["ACCEPTED"], "the lease stood all the while"
        await world.submit("b")
        # Who waited through the outage is told of it, or served.
        with suppress(grpc.RpcError):
            assert [lease.instance.instance_id for lease in (await waiting).leases] in (["b"], [])


async def test_connections_that_a_redis_left_behind_are_made_anew(own_redis):
    async with serving(own_redis.url, sweeping=False) as (_, servicer, _):
        ids = [servicer.runs.ids] * 8  # at once: each has a connection
        await asyncio.gather(*(each() for each in ids))
        own_redis.kill()
        await asyncio.to_thread(own_redis.start)
        assert await asyncio.gather(*(each() for each in ids)) == [[]] * 8, "no call has to be made again"


async def test_a_full_redis_refuses_experience_but_lets_the_trainer_go_on(own_redis, caplog):
    caplog.set_level("INFO")
    async with serving(own_redis.url) as (stub, servicer, host):
        world = await world_of(stub, servicer, "full")
        await world.create(max_staleness=1)
        await world.submit(*"abcd")
        await world.open()
        leases = await world.lease()
        await world.put(*(group(lease, size=100_000) for lease in leases[:2]))
        await health_becomes(host, "SERVING", "redis")
        assert state_of_redis() == "ok"
        await world.redis.config_set("maxmemory", 1)
        await health_becomes(host, "NOT_SERVING", "redis")
        assert state_of_redis() == "full"
        assert list(host.waiting) == ["room in Redis: its memory is full"]
        await refused(world.put(group(leases[2])), grpc.StatusCode.UNAVAILABLE, "OOM")
        assert await code_of(world.submit("e")) == grpc.StatusCode.UNAVAILABLE
        assert await world.state_of("c") == "LEASED"
        renewed = await world.renew(*(lease.lease_id for lease in leases))
        assert len(renewed.lost) == 2, "those that were put"
        await world.batch(0)
        assert await world.trained(0) == 1
        await health_becomes(host, "SERVING")
        assert await world.commit(1) == 2, "this is what frees memory"
        await world.redis.config_set("maxmemory", 0)
        await health_becomes(host, "SERVING", "redis")
        assert state_of_redis() == "ok" and not host.waiting
        said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Redis is ")]
        assert len(said) == 2, "one line for each change, whatever was refused between"
        assert said[0].startswith("Redis is now full: experience and prompts are refused until a commit frees memory; ")
        assert said[1].startswith("Redis is back; it was full for ")
        assert await world.put(group(leases[2])) == ["ACCEPTED"]


async def test_a_redis_that_takes_no_writes_changes_nothing_and_is_unhealthy(own_redis):
    async with serving(own_redis.url) as (stub, servicer, host):
        world = await world_of(stub, servicer, "replica")
        await world.create()
        await world.redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        assert await code_of(world.submit("a")) == grpc.StatusCode.UNAVAILABLE
        assert await code_of(world.lease()) == grpc.StatusCode.UNAVAILABLE
        await health_becomes(host, "NOT_SERVING")
        await world.redis.execute_command("REPLICAOF", "NO", "ONE")
        await health_becomes(host, "SERVING")
        await world.redis.config_set("min-replicas-to-write", 1)
        assert await code_of(world.submit("a")) == grpc.StatusCode.UNAVAILABLE
        await world.redis.config_set("min-replicas-to-write", 0)
        assert (await world.submit("a")).accepted == 1, "it was not submitted before"


@pytest.mark.parametrize(("taken", "granted"), [("-evalsha", "+evalsha"), ("-hset", "+hset"), ("resetkeys", "~q:*")])
async def test_a_user_that_loses_a_right_is_refused_until_it_is_granted(own_redis, taken, granted):
    """As with a replica that is promoted: it has users of its own."""
    with own_redis.client() as admin:
        admin.execute_command("ACL", "SETUSER", *documented_user())
    async with serving(own_redis.url.replace("redis://", "redis://quartet:SECRET@")) as (stub, servicer, host):
        world = await world_of(stub, servicer, "rights")
        await world.create()
        with own_redis.client() as admin:
            admin.execute_command("ACL", "SETUSER", "quartet", taken)
            await refused(world.submit("a"), grpc.StatusCode.UNAVAILABLE, "lacks a right (NOPERM)")
            if taken != "-hset":  # which the sweeper does not need
                await health_becomes(host, "NOT_SERVING")
                assert state_of_redis() == "refusing"
            admin.execute_command("ACL", "SETUSER", "quartet", granted)
        await health_becomes(host, "SERVING")
        assert (await world.submit("b")).accepted == 1


async def test_what_changes_while_the_subscription_is_down_is_not_missed(world, waiting):
    await world.create()
    lease = asyncio.create_task(world.lease(wait=20))
    await waiting(1)
    await world.redis.client_kill_filter(_type="pubsub")
    await world.submit("a")
    async with asyncio.timeout(15):
        assert len(await lease) == 1


async def test_stopping_lets_everyone_who_waits_go(world, broker, waiting):
    _, _, host = broker
    await world.create()
    lease = asyncio.create_task(world.ask(wait=30))
    watch = asyncio.ensure_future(world.call("WatchMembers").read())
    events = world.watch(after="$")  # a call that nobody holds is cancelled
    event = asyncio.ensure_future(events.read())
    await asyncio.gather(watch, waiting(3))
    host.stop("the test says so")
    async with asyncio.timeout(10):
        await host.drain()
        assert not (await lease).leases
        assert await code_of(event) == grpc.StatusCode.UNAVAILABLE


async def test_a_log_cut_anywhere_leaves_an_earlier_state_whole(own_redis, tmp_path):
    """What a power cut leaves of a log that was not on the disk yet."""
    async with serving(own_redis.url, redis_timeout=2.0) as (stub, servicer, _):
        world = await world_of(stub, servicer, "cut")
        await world.create(max_staleness=3, max_deliveries=2)
        await world.submit(*(f"p{n}" for n in range(20)))
        await world.open()
        for step in range(3):
            await world.generate(3, step)
            await world.train(step)
            await world.expire_leases()
        await world.commit(2)
        await world.drop(3, "none")
    own_redis.kill()
    (log,) = [path for path in tmp_path.rglob("*.aof") if "base" not in path.name]
    whole, chance, seen = log.read_bytes(), random.Random(7), set()
    for _ in range(12):
        log.write_bytes(whole[: chance.randrange(len(whole) // 4, len(whole))])
        await asyncio.to_thread(own_redis.start)
        async with serving(own_redis.url, sweeping=False) as (stub, servicer, _):
            world = await world_of(stub, servicer, "cut")
            assert not await world.faults()
            seen.add((await world.stats()).SerializeToString())
        own_redis.kill()
    assert len(seen) > 3, "cut at different places"
