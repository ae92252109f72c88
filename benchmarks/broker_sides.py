"""A process of the broker's benchmarks: `broker_sides.py VARIANT ROLE`, settings and rounds as JSON lines on its input.

VARIANT is `ours`, `redis` or `relay`, ROLE `producer` or `consumer`. The first input line has the settings, each later
one is a round: the number of groups to publish or to take; one more line tells the producer that all were taken. The
output is {"ready": true} after the settings, and at the end of each round

    at         when the first put began (producer), or when the last group was committed (consumer); time.monotonic()
    cpu        seconds of CPU that this process used in the round
    leases     seconds of each LeasePrompts that granted leases (ours only)
    checksum   of the decoded arrays, in a round with "check": true

The peer, redis-py with the same Redis: the producer adds the same bytes to a stream, as many per pipeline as ours has
in a call; the consumer reads as many at once with a consumer group, decodes them with the same function, acknowledges
and deletes them. It is a lower bound of durable, acknowledged delivery with this Redis.

The relay (`broker_relay.py`): the same through a gRPC server that only forwards bytes; the producer has as many
concurrent calls as ours, each with all its groups in one message. It is a lower bound of a gRPC broker in Python with
messages of that size; if they are large (padded, 128 per call), ours of at most 6 MiB may be faster.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator

import broker_relay
import grpc
import redis
from broker_load import Produced, Rollout, Trainer, decode_group, encode_group, flatten
from groups import checksum, make_groups

from quartet_common.channel import channel_options, connect_sync
from quartet_server.process import keep_freed_memory

DISTINCT = 64  # groups made beforehand; the n-th group sent is the (n mod DISTINCT)-th of them
BLOCK_MS = 30_000
GROUP = "trainer"


class Take:
    """Decodes groups, and keeps what a checksum needs when it is asked for."""

    def __init__(self) -> None:
        self._check, self._kept = False, []

    def begin(self, check: bool) -> None:
        self._check, self._kept = check, []

    def __call__(self, tensors: bytes) -> None:
        decoded = decode_group(tensors)
        if self._check:
            self._kept.append(flatten(decoded))

    def checksum(self) -> int | None:
        return checksum(self._kept) if self._check else None


async def produce_ours(settings: dict) -> None:
    """Run one rollout, or those in `names`, each "generating" for `think` seconds on average.

    `arrays`: encode each group as it is sent; else it is encoded beforehand, or is some `bytes`.
    """
    groups = make_groups(settings["shape"], DISTINCT)
    if size := settings.get("bytes"):
        encoded = [random.Random(0).randbytes(size)] * DISTINCT
    elif not settings["arrays"]:
        encoded = [encode_group(group) for group in groups]
    names, mean = settings.get("names", ["rollout"]), settings.get("think", 0.0)
    chance = random.Random(names[0])
    think = (lambda: chance.uniform(0.5, 1.5) * mean) if mean else None
    place = (settings["address"], settings["run_id"])
    rollouts = [Rollout(*place, name, settings["per_call"], settings["in_flight"], think) for name in names]
    await asyncio.gather(*(rollout.join() for rollout in rollouts))

    def payload(number: int) -> bytes:
        return encode_group(groups[number % DISTINCT]) if settings["arrays"] else encoded[number % DISTINCT]

    async def produce(rollout: Rollout, produced: Produced) -> None:
        await asyncio.sleep(chance.random() * mean)  # rollouts do not march in step
        await rollout.produce(payload, produced)

    answer({"ready": True})
    while await asyncio.to_thread(sys.stdin.readline):
        all_produced, cpu = [Produced() for _ in rollouts], time.process_time()
        work = [asyncio.create_task(produce(*pair)) for pair in zip(rollouts, all_produced, strict=True)]
        end = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
        done, _ = await asyncio.wait({end, *work}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # a rollout's work ends by an exception only
        for task in work:
            task.cancel()
        await asyncio.wait(work)
        at = min((each.first_put for each in all_produced if each.first_put), default=0.0)
        leases = [second for each in all_produced for second in each.lease_seconds]
        answer({"at": at, "cpu": time.process_time() - cpu, "leases": leases})
    await asyncio.gather(*(rollout.leave() for rollout in rollouts))


def consume_ours(settings: dict) -> None:
    """Run the trainer; `arrays`: decode each group."""
    trainer = Trainer(settings["address"], settings["run_id"], settings["commit_every"], settings["per_call"])
    trainer.open()
    take = Take()

    def consume(count: int) -> float:
        return trainer.consume(count // settings["groups_per_step"], take if settings["arrays"] else len)

    consume_rounds(take, consume)
    trainer.close()


def produce_redis(settings: dict) -> None:
    client = redis.Redis.from_url(settings["redis_url"])
    groups = make_groups(settings["shape"], DISTINCT)
    answer({"ready": True})
    for line in sys.stdin:
        request, cpu = json.loads(line), time.process_time()
        began = time.monotonic()
        for start in range(0, request["groups"], settings["per_call"]):
            pipeline = client.pipeline(transaction=False)
            for n in range(start, min(request["groups"], start + settings["per_call"])):
                pipeline.xadd(settings["run_id"], {"group": encode_group(groups[n % DISTINCT])})
            pipeline.execute()
        sys.stdin.readline()
        answer({"at": began, "cpu": time.process_time() - cpu})


def consume_redis(settings: dict) -> None:
    client, stream = redis.Redis.from_url(settings["redis_url"]), settings["run_id"]
    client.xgroup_create(stream, GROUP, mkstream=True)
    take = Take()

    def consume(count: int) -> float:
        while count > 0:
            read = client.xreadgroup(GROUP, "one", {stream: ">"}, count=settings["per_call"], block=BLOCK_MS)
            if not read:
                raise RuntimeError(f"nothing came for {BLOCK_MS} ms; {count} groups are missing")
            entries = read[0][1]
            for _, fields in entries:
                take(fields[b"group"])
            ids = [entry_id for entry_id, _ in entries]
            client.pipeline(transaction=False).xack(stream, GROUP, *ids).xdel(stream, *ids).execute()
            count -= len(entries)
        return time.monotonic()

    consume_rounds(take, consume)


async def produce_relay(settings: dict) -> None:
    async with grpc.aio.insecure_channel(settings["relay"], options=channel_options()) as channel:
        put = channel.unary_unary(f"/{broker_relay.SERVICE}/Put")
        groups, stream = make_groups(settings["shape"], DISTINCT), settings["run_id"].encode()
        answer({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            request, cpu = json.loads(line), time.process_time()
            began = time.monotonic()
            starts = iter(range(0, request["groups"], settings["per_call"]))

            async def work(starts: Iterator[int], count: int) -> None:
                for start in starts:
                    end = min(count, start + settings["per_call"])
                    parts = (encode_group(groups[n % DISTINCT]) for n in range(start, end))
                    await put(broker_relay.pack((stream, *parts)), timeout=BLOCK_MS / 1000)

            await asyncio.gather(*(work(starts, request["groups"]) for _ in range(settings["in_flight"])))
            await asyncio.to_thread(sys.stdin.readline)
            answer({"at": began, "cpu": time.process_time() - cpu})


def consume_relay(settings: dict) -> None:
    stream = settings["run_id"].encode()
    with redis.Redis.from_url(settings["redis_url"]) as client:
        client.xgroup_create(stream, GROUP, mkstream=True)
    take = Take()
    with connect_sync(settings["relay"]) as channel:
        ask = channel.unary_unary(f"/{broker_relay.SERVICE}/Take")
        request = broker_relay.pack((stream, str(settings["per_call"]).encode()))

        def consume(count: int) -> float:
            while count > 0:
                groups = broker_relay.unpack(ask(request, timeout=BLOCK_MS / 1000))
                for group in groups:
                    take(group)
                count -= len(groups)
            return time.monotonic()

        consume_rounds(take, consume)


def consume_rounds(take: Take, consume: Callable[[int], float]) -> None:
    answer({"ready": True})
    for line in sys.stdin:
        request, cpu = json.loads(line), time.process_time()
        take.begin(request["check"])
        at = consume(request["groups"])
        answer({"at": at, "cpu": time.process_time() - cpu, "checksum": take.checksum()})


def answer(line: dict) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    variant, role = sys.argv[1:]
    keep_freed_memory()  # as the services do; for the peer as well
    settings = json.loads(sys.stdin.readline())
    match variant, role:
        case "ours", "producer":
            asyncio.run(produce_ours(settings))
        case "ours", "consumer":
            consume_ours(settings)
        case "redis", "producer":
            produce_redis(settings)
        case "redis", "consumer":
            consume_redis(settings)
        case "relay", "producer":
            asyncio.run(produce_relay(settings))
        case "relay", "consumer":
            consume_relay(settings)
        case _:
            raise SystemExit(f"no side is called '{variant} {role}'")


if __name__ == "__main__":
    main()
