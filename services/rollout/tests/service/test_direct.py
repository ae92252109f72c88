"""Direct use over real sockets: who is let in, when, beside the run's own prompts, and what becomes of who gives up."""

import asyncio
from dataclasses import replace

import grpc
import numpy as np
from quartet.v1 import experience_pb2, rollout_pb2
from world import instance, refusal, refused

from quartet_common.errors import describe, retry_delay


def generate(world, n: int = 1, tokens: int = 8, text: str = "x", timeout: float = 30.0):
    prompt = experience_pb2.Prompt(text=text, sampling={"n": n, "max_new_tokens": tokens})
    return asyncio.ensure_future(world.stub.Generate(rollout_pb2.GenerateRequest(prompt=prompt), timeout=timeout))


def order(world) -> list[str]:
    """The prompts that the engine has been given, as text."""
    return ["".join(chr(token) for token in prompt) for _, prompt, _, _ in world.engine.requests]


async def test_calls_wait_for_the_engine(world):
    loading = asyncio.Event()
    world.engine.start = loading.wait
    await world.start()
    assert "engine loading" in list(world.host.waiting)
    await refused(world.join(), grpc.StatusCode.UNAVAILABLE)
    error = await refusal(generate(world), grpc.StatusCode.UNAVAILABLE)
    assert "still loading" in describe(error) and retry_delay(error)
    loading.set()
    await world.until(lambda: world.service.state.run is not None)
    await generate(world)


async def test_requests_wait_for_their_turn_and_are_served_in_order(world):
    world.engine.unpaused.clear()
    await world.ready(max_direct_completions=2, max_direct_queued=6)
    calls = [generate(world, 2, text="a")]
    await world.until(lambda: world.engine.running == 2)
    for waiting, name in enumerate("bcd", start=1):
        calls.append(generate(world, 2, text=name))
        await world.until(lambda waiting=waiting: world.service.admission.waiting == 2 * waiting)
    error = await refusal(generate(world), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert retry_delay(error) and "6 wait" in describe(error)
    error = await refusal(generate(world, 3), grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert retry_delay(error) is None and "3 completions were asked for; allowed: 2" in describe(error)
    calls.pop(2).cancel()  # who hangs up loses his place, and nobody else's
    await world.until(lambda: world.service.admission.waiting == 4)
    world.engine.unpaused.set()
    answers = await asyncio.gather(*calls)
    assert [len(answer.completions) for answer in answers] == [2, 2, 2]
    assert order(world) == ["a", "b", "d"]
    assert world.service.admission.running == world.service.admission.waiting == 0


async def test_a_deadline_ends_waiting_and_generating(world):
    world.engine.unpaused.clear()
    await world.ready(max_direct_completions=1)
    runs, waits = generate(world, timeout=1.5), generate(world, timeout=1.0)
    await world.until(lambda: world.service.admission.waiting == 1)
    await refused(waits, grpc.StatusCode.DEADLINE_EXCEEDED)
    await world.until(lambda: world.service.admission.waiting == 0)
    await refused(runs, grpc.StatusCode.DEADLINE_EXCEEDED)
    await world.until(lambda: world.service.admission.running == world.engine.running == 0)  # aborted


async def test_the_runs_prompts_and_direct_requests_share_the_engine(world):
    """Sixteen places, a quarter of them for direct use: neither side takes the other's."""
    world.engine.step, world.engine.length = 0.01, 6
    await world.start(max_running_completions=16)
    await world.broker.submit(*(instance(f"{n}") for n in range(60)))
    await world.until(lambda: world.engine.running == 16)
    calls = [generate(world, text="d") for _ in range(20)]
    seen: list[tuple[int, int]] = []

    def all_answered() -> bool:
        seen.append((world.service.admission.running, world.service.groups.generating))
        return all(call.done() for call in calls)

    await world.until(all_answered)
    assert max(direct for direct, _ in seen) == 4
    beside = [own for direct, own in seen if direct == 4]
    assert sum(beside) / len(beside) > 6  # of twelve: the run goes on meanwhile
    await world.broker.until(lambda: len(world.broker.puts) == 60)


async def test_a_slow_reader_is_told_why_its_stream_was_interrupted(world):
    long = np.full(1_000_000, ord("a"), np.int32)  # more than is sent to a caller who does not read
    world.engine.alter = lambda done: replace(done, token_ids=long, log_probs=np.zeros(long.size, np.float32))
    await world.ready()
    request = rollout_pb2.GenerateStreamRequest(prompt={"text": "x", "sampling": {"n": 1}})
    stream = world.stub.GenerateStream(request, timeout=30.0)
    await world.until(lambda: world.engine.tokens_total and not world.engine.running)
    world.broker.create_run()
    world.service.membership.request_heartbeat()
    await world.until(lambda: world.service.admission.running == 0)
    assert (await stream.read()).completion.info.tokens == long.size
    assert "the run was recreated" in await refused(stream.read(), grpc.StatusCode.UNAVAILABLE)


async def test_a_rollout_that_stops_turns_away_who_waits_and_finishes_what_runs(world):
    world.engine.unpaused.clear()
    await world.ready(drain_seconds=60.0, max_direct_completions=1)
    runs = generate(world)
    await world.until(lambda: world.engine.running == 1)
    waits = generate(world)
    await world.until(lambda: world.service.admission.waiting == 1)
    stopping = asyncio.ensure_future(world.stop())
    assert "it is stopping; ask another rollout" in await refused(waits, grpc.StatusCode.UNAVAILABLE)
    assert world.engine.running == 1 and not world.engine.closed  # the other one goes on meanwhile
    world.engine.unpaused.set()
    assert len((await runs).completions) == 1
    assert await stopping == 0


async def test_a_rollout_that_stops_leaves_requests_of_the_endpoint_to_its_server(world):
    await world.ready()
    service = world.service
    async with service.admission.entered(1):
        await asyncio.wait_for(service._direct.stop(0.1), 10.0)
        assert service.admission.running == 1


async def test_what_a_stopping_rollout_cannot_finish_in_time_is_aborted(world):
    world.engine.unpaused.clear()
    await world.ready(drain_seconds=1.5)
    unary = generate(world)
    stream = world.stub.GenerateStream(rollout_pb2.GenerateStreamRequest(prompt={"text": "x"}), timeout=30.0)
    reading = asyncio.ensure_future(stream.read())
    await world.until(lambda: world.engine.running == 3)
    stopping = asyncio.ensure_future(world.stop())
    for call in (unary, reading):
        assert "not finished in time" in await refused(call, grpc.StatusCode.UNAVAILABLE)
    assert world.engine.running == 0
    assert await stopping == 0
