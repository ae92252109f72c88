"""An engine that hangs is noticed: a real rollout whose engine's process is stopped, and engines that are only slow."""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from quartet.v1 import rollout_pb2, rollout_pb2_grpc
from world import instance

from quartet_common.channel import connect
from quartet_common.ports import free_ports
from quartet_rollout.engines.base import EngineStats, SamplingSettings
from quartet_rollout.stall import StallWatch
from quartet_rollout.state import RolloutState
from quartet_server import stall
from quartet_server.stall import LEAST_SECONDS, STEPS

sys.path.append(str(Path(__file__).resolve().parents[1] / "engines"))
from models import write_model  # noqa: E402

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
STALL_SECONDS, DRAIN_SECONDS = 3.0, 15.0
RUN_FILE = """
[run]
id = "demo"
[model]
path = {model}
[addresses]
broker = {broker}
reward = {reward}
rollout = {rollout}
[server]
metrics = false
drain_seconds = {drain}
[rollout]
engine = "{engine}"
initial_version = 0
stall_seconds = {stall}
max_running_completions = 8
max_direct_completions = 2
[rollout.{engine}]
{options}
"""


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("transformers", 'device = "cpu"', "transformers"),
        ("vllm", "kv_cache_gib = 0.0625\nmax_num_seqs = 8\nmax_num_batched_tokens = 2048", "EngineCore"),
    ],
)
async def test_a_rollout_whose_engine_is_stopped_gives_its_leases_to_another_and_ends_with_status_1(
    world, tmp_path, kind, options, name
):
    (port,) = free_ports(1)
    address, file, log = f"127.0.0.1:{port}", tmp_path / "run.toml", tmp_path / "log"
    places = {"model": write_model(tmp_path / "model", tied=True, seed=0), "rollout": address}
    places |= {"broker": world.broker_host.address, "reward": world.reward_host.address}
    quoted = {name: json.dumps(str(place)) for name, place in places.items()}
    times = {"stall": STALL_SECONDS, "drain": DRAIN_SECONDS}
    file.write_text(RUN_FILE.format(**quoted, **times, engine=kind, options=options))
    world.broker.run.spec.sampling.max_new_tokens = 1900
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "quartet_rollout", file, "--log-format", "json", stderr=output
        )
    try:
        async with connect(address, service="rollout") as channel:
            request = health_pb2.HealthCheckRequest(service="quartet.v1.RolloutService")
            states = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True, timeout=200)
            while (await states.read()).status != SERVING:
                pass
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            assert (await stub.GetStatus(rollout_pb2.RolloutServiceGetStatusRequest())).max_model_len, "it is loaded"
            await world.broker.submit(*map(instance, map(str, range(40))))
            await world.broker.until(lambda: world.broker.puts and world.broker.leases, 60)
            direct = stub.Generate(rollout_pb2.GenerateRequest(prompt={"text": "x"}), timeout=60)

            children = psutil.Process(process.pid).children()
            (engine,) = [each for each in children if name in each.name() + " ".join(each.cmdline())]
            engine.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            held = dict(world.broker.leases)
            assert (await states.read()).status == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="its engine has stalled|it is stopping"):
                await direct
        await world.broker.until(lambda: not world.broker.leases, DRAIN_SECONDS)
        assert not any(release.failure for release in world.broker.releases), "no attempt is counted"
        assert await process.wait() == 1
        assert STALL_SECONDS <= time.monotonic() - began < STALL_SECONDS + DRAIN_SECONDS
        engine.wait(60)
        assert len(world.broker.left) == 1
        said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        (sentence,) = [line["message"] for line in said if line["message"].startswith("the engine has stalled")]
        assert "the engine has stalled: no token for 3." in sentence and "rollout.stall_seconds is 3" in sentence
    finally:
        if process.returncode is None:
            for each in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
                each.kill()
            await process.wait()
    given_back = [held[release.lease_id] for release in world.broker.releases if release.lease_id in held]
    assert given_back
    world.broker.run.spec.sampling.max_new_tokens = 8  # what the other's engine takes
    await world.put(*given_back)


async def test_a_rollout_serves_and_registers_only_when_its_engine_is_loaded(world):
    loaded, start = asyncio.Event(), world.engine.start

    async def load() -> None:
        await start()
        await loaded.wait()

    world.engine.start = load
    await world.start()
    async with connect(world.host.address, service="rollout") as channel:
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await states.read()).status == NOT_SERVING
        await world.until(lambda: "start" in world.engine.calls)
        assert not world.broker.members and "engine loading" in world.host.waiting
        loaded.set()
        assert (await states.read()).status == SERVING
        await world.broker.until(lambda: world.broker.members)
        world.host.stop("the test ends")
        assert (await states.read()).status == NOT_SERVING


async def test_an_engine_that_hangs_in_the_pause_of_an_update_ends_the_rollout_too(world, caplog):
    world.engine.resume = asyncio.Event().wait
    await world.ready()
    update = asyncio.create_task(world.load(version=1, seconds=0.2))
    await world.until(world.host.stopping.is_set)
    await asyncio.wait({update})
    assert await world.stop() == 1
    assert "weight update 1 failed: the engine did not answer within 0.6 s of the transfer's end" in caplog.text


def observed(watch: StallWatch, *looks: tuple[EngineStats | None, float]) -> list[bool]:
    return [watch.observe(stats, seconds) for stats, seconds in looks]


def working(tokens: int, steps: int = 0) -> EngineStats:
    return EngineStats(running=2, waiting=0, kv_cache_use=-1.0, tokens_total=tokens, steps=steps)


@pytest.mark.parametrize("progress", [working(6), working(5, steps=1), EngineStats(1, 1, -1.0, 5), None])
def test_tokens_steps_ended_completions_and_an_idle_engine_are_no_stall(progress):
    watch = StallWatch(RolloutState("r"), 3.0, pytest.fail)
    waits = [(working(5), 0.75)] * 5
    assert not any(observed(watch, *waits, (progress, 0.75), *waits))
    assert observed(watch, (working(5), 0.75))[-1], "the same looks once more, without progress"


def test_the_default_limit_follows_the_slowest_step():
    watch = StallWatch(RolloutState("r"), None, pytest.fail)
    assert watch.limit == LEAST_SECONDS
    slow = 0.9 * LEAST_SECONDS
    looks = [(working(1), 0.75)] * (1 + int(slow / 0.75))
    assert not any(observed(watch, *looks, (working(2), 0.75)))
    assert watch.limit == pytest.approx(STEPS * slow, rel=0.02)
    assert not any(observed(watch, *[(working(2), 0.75)] * int(0.9 * watch.limit / 0.75)))
    assert any(observed(watch, *[(working(2), 0.75)] * int(0.2 * watch.limit / 0.75)))


def test_time_in_which_the_rollout_itself_stood_still_is_not_the_engines():
    watch = StallWatch(RolloutState("r"), 30.0, pytest.fail)
    assert not any(observed(watch, (working(1), 0.2), (working(1), 3600.0)))


@pytest.mark.parametrize("halt", ["pause", "sleep"])
async def test_an_engine_that_is_paused_or_asleep_is_not_stalled(world, monkeypatch, halt):
    monkeypatch.setattr(stall, "LOOK_SECONDS", 0.01)
    world.engine.hold(1)
    await world.ready(stall_seconds=0.3)
    state = world.service.state
    state.paused, state.sleep_level = halt == "pause", int(halt == "sleep")
    watch, loop = world.service._stall, asyncio.get_running_loop()
    until = loop.time() + 1.0
    async with asyncio.timeout(20):
        running = asyncio.create_task(anext(world.engine.generate("x", [97], 1, SamplingSettings())))
        while loop.time() < until:
            await state.changes.wait(0.05)
        assert not world.host.stopping.is_set() and watch.stalled == 0 and world.engine.running == 1
        state.paused, state.sleep_level = False, 0
        await world.host.stopping.wait()
        running.cancel()
    assert await world.stop() == 1
