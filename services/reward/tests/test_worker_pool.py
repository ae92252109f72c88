"""Workers: their answers, limits and ends, and waiting for them. test_service.py kills busy workers."""

import asyncio
import os
import resource

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from reward_samples import ENDLESS, until

from quartet_common.config import load_config
from quartet_reward.app import serve
from quartet_reward.config import RewardModelSection, RewardSection
from quartet_reward.errors import ShuttingDown, VerifierCrashed
from quartet_reward.math.equality import worker_command
from quartet_reward.math.worker import _limit_cpu
from quartet_reward.reward_model import RewardModel
from quartet_reward.workers.pool import NoFreeWorker, WorkerPool
from quartet_server.host import ServiceHost
from quartet_server.worker_process import WorkerCommand, WorkerProcess

QUICK = {"reference": r"\sqrt{64}", "answer": "8"}
ECHO = """
import sys
from quartet_server import worker_protocol as protocol
protocol.serve(int(sys.argv[1].removeprefix("--parent=")), lambda: lambda request: request)
"""


async def test_a_worker_judges_so_many_references_and_another_takes_its_place_until_the_pool_closes():
    pool = WorkerPool("math", worker_command(1 << 30), 600.0, queue_seconds=60.0, recycle_after=3)
    pool.start()
    try:
        assert await pool.run({"reference": QUICK["reference"]}) == {"event": "judged", "is_text": False}
        (first,) = pool.pids
        # It leaves the processors to what answers.
        nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
        assert (os.getsid(first), os.getpriority(os.PRIO_PROCESS, first)) == (first, nice)
        assert (await pool.run({"reference": "x = x"}))["event"] == "bad_reference"
        # It can be read, and its text repeated; that it cannot be evaluated does not make it a bad one.
        assert (await pool.run({"reference": ENDLESS}))["event"] == "judged"
        assert await pool.run(QUICK) == {"event": "done", "equal": True, "left": ""}
        (second,) = pool.pids
        assert second != first
        running = asyncio.create_task(pool.run({"reference": "8", "answer": ENDLESS}))
        queued = asyncio.create_task(pool.run(QUICK))
        await until(lambda: pool.busy == 1 and pool.waiting == 1)
    finally:
        await pool.close()
    for task in (running, queued):
        with pytest.raises(ShuttingDown):
            await task
    assert not any(os.path.exists(f"/proc/{pid}") for pid in (first, second))


async def test_nothing_more_is_asked_of_a_worker_whose_answer_was_its_last(tmp_path, caplog):
    (tmp_path / "echo.py").write_text(ECHO)
    command = WorkerCommand("echo", variables={"PYTHONPATH": str(tmp_path)})
    pool = WorkerPool("math", command, 600.0, queue_seconds=60.0)
    pool.start()
    try:
        await pool.run({"event": "out_of_memory", "last": True})
        (first,) = pool.pids
        await pool.run({"event": "done"})
        assert first not in pool.pids and not caplog.messages
    finally:
        await pool.close()


async def test_a_task_waits_once_for_a_worker_and_no_death_is_logged_where_none_died(caplog):
    pool = WorkerPool("math", worker_command(1 << 30), 600.0, queue_seconds=0.5)  # none is started
    async with asyncio.timeout(0.9):
        with pytest.raises(NoFreeWorker, match="no worker became free"):
            await pool.run(QUICK)
    assert not caplog.messages


async def test_texts_of_a_batch_wait_together_for_a_reward_model_that_does_not_start(tmp_path):
    model = RewardModel(RewardModelSection(path=tmp_path), queue_seconds=1.0)
    model.start()
    try:
        async with asyncio.timeout(3.0):
            read = await asyncio.gather(*(model.read(text) for text in "abcd"), return_exceptions=True)
    finally:
        await model.close()
    assert [str(error) for error in read] == ["the reward model's process: no worker became free within 1 s"] * 4


async def test_an_answer_that_cannot_be_used_fails_its_texts_and_no_later_ones(tmp_path, monkeypatch):
    replies = [{"event": "done"}, {"event": "done", "logits": [[0.5]], "tokens": [1], "cut": [0]}]

    async def reply(request):
        return replies.pop(0)

    model = RewardModel(RewardModelSection(path=tmp_path), queue_seconds=60.0)
    monkeypatch.setattr(model.pool, "start", lambda: None)
    monkeypatch.setattr(model.pool, "run", reply)
    model.start()
    try:
        async with asyncio.timeout(3.0):
            with pytest.raises(VerifierCrashed, match="the reward model failed: KeyError: 'logits'"):
                await model.read("a")
            assert (await model.read("b")).logits == (0.5,)
    finally:
        await model.close()


def test_a_limit_of_cpu_time_that_the_service_runs_under_is_kept_by_its_workers():
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    lower = 10**9 if hard == resource.RLIM_INFINITY else hard - 1
    resource.setrlimit(resource.RLIMIT_CPU, (lower, lower))
    try:
        _limit_cpu(1000)
        assert resource.getrlimit(resource.RLIMIT_CPU)[1] == lower
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, (lower, lower))


async def test_the_service_is_serving_when_a_worker_of_each_kind_can_judge(monkeypatch):
    loaded, await_ready = asyncio.Event(), WorkerProcess.await_ready

    async def load(worker: WorkerProcess) -> None:
        await loaded.wait()
        await await_ready(worker)

    monkeypatch.setattr(WorkerProcess, "await_ready", load)
    config = load_config("reward", RewardSection, overrides=["addresses.reward=127.0.0.1:0"])
    host = ServiceHost("reward", config.addresses.reward, config.security, config.server)
    service = asyncio.create_task(serve(config, host))
    await until(lambda: not host.address.endswith(":0"))
    async with grpc.aio.insecure_channel(host.address) as channel:
        states = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await states.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert list(host.waiting) == ["workers loading"]
        loaded.set()
        assert (await states.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert not list(host.waiting)
        host.stop("the test ends")
        assert (await states.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        states.cancel()
    await service
