"""EnvironmentService over a real socket, with real worker processes: episodes, and what becomes of those that fail."""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from episodes import Running, endpoint, episode, serving, until
from quartet.v1 import environment_pb2, experience_pb2, reward_pb2

from quartet_common.errors import retry_delay
from quartet_environment import pool as pools

AGENTS = """
import asyncio, ctypes, math, os, pathlib, re, subprocess, sys, time
import openai
from quartet_environment import Reward, Seat

async def play(task, endpoint, *, bonus: float = 0.0):
    "Asks once."
    said = await endpoint.client.chat.completions.create(
        model=endpoint.model,
        messages=task.messages or [{"role": "user", "content": task.data["text"]}],
        **task.sampling,
    )
    return float(said.choices[0].message.content == task.answer) + bonus

def tasks(count: int = 3, bonus: float = 0.0):
    if count < 1:
        yield {"text": "x" * (16 << 20) if count else math.nan}
    for i in range(count):
        yield {"id": f"t{i}", "text": str(i), "answer": str(i)}

def plain(task, endpoint):
    client = openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)
    said = client.chat.completions.create(model=endpoint.model, messages=task.messages)
    return len(said.choices[0].message.content)

async def two(task, endpoint):
    for name in ("a", "b"):
        client = endpoint.seat(name).client
        await client.chat.completions.create(model=endpoint.model, messages=[{"role": "user", "content": name}])
    return Reward(seats=[Seat("a", 1.0), Seat("b", 0.0, turns=[0.5])])

async def acts(task, endpoint):
    what = task.data["act"]
    if what == "wait": await asyncio.sleep(task.data.get("seconds", 600))
    if what == "raise": raise KeyError("a")
    if what == "group":
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(600))
            group.create_task(endpoint.client.models.retrieve("a"))
    if what == "exit": sys.exit(3)
    if what == "die": os._exit(3)
    if what == "nan": return math.nan
    if what == "none": return None
    if what == "block": time.sleep(600)
    if what == "lock": ctypes.PyDLL(None).pause()
    if what == "deaf":
        while True:
            try: await asyncio.sleep(600)
            except asyncio.CancelledError: pass
    if what == "flood":
        for _ in range(100):
            print("x" * 2**20)
        return Reward(1.0, notes="n" * 100 * 2**20)
    if what == "stdin": return float(len(subprocess.run(["cat"], stdout=subprocess.PIPE).stdout))
    if what == "leave":
        asyncio.create_task(later(task.data["file"]))
        await asyncio.sleep(0)
    if what == "pid": return os.getpid()
    return 1.0

async def later(file):
    await asyncio.sleep(1.0)
    pathlib.Path(file).write_text("still there")

def stuck(task, endpoint):
    time.sleep(600)
"""
NAMES = ("play", "plain", "two", "acts", "stuck")


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("agents") / "agents.py"
    path.write_text(AGENTS)
    return str(path)


def files(file: str, *names: str) -> str:
    return f"environment.files={json.dumps([f'{file}:{name}' for name in names])}"


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def service(file) -> AsyncIterator[Running]:
    async with serving(files(file, *NAMES), "environment.workers=1", "environment.hang_seconds=2") as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def refused(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def failure(service, name, **fields) -> environment_pb2.EpisodeFailure:
    answer = await service.play(name, **fields)
    assert answer.WhichOneof("result") == "failure", answer
    return answer.failure


def only_reward(answer: environment_pb2.RunEpisodeResponse) -> float:
    (seat,) = answer.finished.seats
    (reward,) = seat.rewards
    return reward.value


async def test_environments_are_listed_with_parameters_and_tasks(service, file):
    listed = await service.stub.ListEnvironments(environment_pb2.ListEnvironmentsRequest())
    assert [one.name for one in listed.environments] == sorted(f"{file}:{name}" for name in NAMES)
    one = next(one for one in listed.environments if one.name.endswith(":play"))
    assert (one.description, one.has_tasks) == ("Asks once.", True)
    assert set(json.loads(one.parameters_schema)["properties"]) == {"count", "bonus"}


async def test_tasks_are_prompts_in_their_order(service, file):
    request = environment_pb2.ListTasksRequest(environment=f"{file}:play")
    request.parameters.update({"count": 200})

    async def listed() -> list[experience_pb2.Prompt]:
        return [prompt async for answer in service.stub.ListTasks(request) for prompt in answer.prompts]

    prompts = await listed()
    assert [one.prompt_id for one in prompts] == [f"t{i}" for i in range(200)]
    assert json.loads(prompts[7].task) == {"id": "t7", "text": "7", "answer": "7"}
    request.limit = 2
    assert [one.prompt_id for one in await listed()] == ["t0", "t1"]
    request.parameters.update({"nothing": 1})
    error = await refused(listed())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "parameters.nothing" in error.details()


@pytest.mark.parametrize(
    "count, said", [(0, "text: got nan; allowed: a finite number"), (-1, "bytes; allowed: at most")]
)
async def test_a_task_that_cannot_be_sent_is_named(service, file, count, said):
    request = environment_pb2.ListTasksRequest(environment=f"{file}:play")
    request.parameters.update({"count": count})

    async def listed() -> None:
        async for _ in service.stub.ListTasks(request):
            pass

    error = await refused(listed())
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "task 0 of" in error.details() and said in error.details()


async def test_an_agent_plays_by_a_ready_client_with_the_runs_sampling(service, file):
    sampling = experience_pb2.SamplingParams(temperature=0.5, max_new_tokens=7, top_k=3)
    with endpoint() as (url, calls):
        answer = await service.play(
            f"{file}:play", task={"text": "8", "answer": "8"}, parameters={"bonus": 0.5}, url=url, sampling=sampling
        )
    assert only_reward(answer) == 1.5
    (call,) = calls
    assert call["path"] == "/v1/chat/completions" and call["headers"]["Authorization"] == "Bearer episode-key"
    assert {key: call["body"][key] for key in ("model", "temperature", "max_tokens", "top_k")} == {
        "model": "policy",
        "temperature": 0.5,
        "max_tokens": 7,
        "top_k": 3,
    }


async def test_chats_and_texts_are_messages_and_a_plain_function_may_block(service, file):
    chat = experience_pb2.Chat(messages=[experience_pb2.Message(role="user", content="12345")])
    with endpoint() as (url, _):
        of_chat = experience_pb2.Prompt(chat=chat, reference=reward_pb2.Reference(answer="12345"))
        assert only_reward(await service.play(f"{file}:play", prompt=of_chat, url=url)) == 1.0
        of_text = experience_pb2.Prompt(text="abc")
        assert only_reward(await service.play(f"{file}:plain", prompt=of_text, url=url)) == 3.0


async def test_seats_call_under_their_own_sessions(service, file):
    with endpoint() as (url, calls):
        answer = await service.play(f"{file}:two", url=url)
    assert [call["headers"]["X-Session-ID"] for call in calls] == ["a", "b"]
    assert [(seat.name, list(seat.sessions)) for seat in answer.finished.seats] == [("a", ["a"]), ("b", ["b"])]


@pytest.mark.parametrize(
    "act, retryable, said",
    [
        ("raise", False, "raised KeyError: 'a'"),
        ("exit", False, "raised SystemExit: 3"),
        ("group", True, "raised APIConnectionError"),
        ("nan", False, "returned nan (float)"),
        ("none", False, "returned None (NoneType)"),
        ("die", True, "its process ended: it exited with status 3"),
        ("block", True, "the agent blocked its process for"),
        ("lock", True, "an agent blocked its process for"),
    ],
)
async def test_an_agent_that_fails_gives_no_reward_and_the_next_one_plays(service, file, act, retryable, said):
    found = await failure(service, f"{file}:acts", task={"act": act})
    assert found.retryable is retryable and said in found.message
    if act in ("raise", "block"):
        assert found.place.startswith(f"{file}:") and found.traceback
    await until(lambda: service.environments[f"{file}:acts"].pool._free())
    assert only_reward(await service.play(f"{file}:acts", task={"act": "nothing"})) == 1.0


@pytest.mark.parametrize("status, retryable", [(429, True), (503, True), (400, False), (401, False)])
async def test_what_the_endpoint_refuses_is_retryable_where_it_passes(service, file, status, retryable):
    with endpoint(status) as (url, _):
        found = await failure(service, f"{file}:play", task={"text": "1"}, url=url)
    assert found.retryable is retryable and str(status) in found.message


async def test_an_endpoint_that_is_away_is_retryable(service, file):
    found = await failure(service, f"{file}:play", task={"text": "1"})
    assert found.retryable and "APIConnectionError" in found.message


async def test_a_flood_is_bounded_and_neighbours_play_meanwhile(service, file, caplog):
    caplog.set_level("INFO")
    flood = asyncio.create_task(service.play(f"{file}:acts", task={"act": "flood"}))
    waits = []
    with endpoint() as (url, _):
        while not flood.done():
            began = time.monotonic()
            await service.play(f"{file}:plain", prompt=experience_pb2.Prompt(text="abc"), url=url)
            waits.append(time.monotonic() - began)
            await asyncio.sleep(0.02)
    answer = await flood
    assert only_reward(answer) == 1.0 and len(answer.finished.notes) == 10_000
    assert max(waits) < 1.0
    printed = [record for record in caplog.records if record.name == "quartet_environment.agent"]
    assert sum(len(record.getMessage()) for record in printed) < 2**20
    await until(lambda: any("bytes that agents printed were dropped" in each.getMessage() for each in caplog.records))


async def test_programs_of_an_agent_do_not_read_its_requests(service, file):
    assert only_reward(await service.play(f"{file}:acts", task={"act": "stdin"})) == 0.0


@pytest.mark.parametrize("act", ["wait", "deaf"])
async def test_an_episode_ends_at_its_deadline_and_not_its_neighbours(service, file, act):
    pool = service.environments[f"{file}:acts"].pool
    (before,) = pool.pids
    neighbour = asyncio.create_task(service.play(f"{file}:acts", task={"act": "wait", "seconds": 4}))
    await until(lambda: pool.playing == 1)
    began = time.monotonic()
    found = await failure(service, f"{file}:acts", task={"act": act}, deadline=0.5)
    assert time.monotonic() - began < 2.0
    assert found.retryable and "took longer than its 0.5 s" in found.message
    assert only_reward(await neighbour) == 1.0
    if act == "deaf":
        await until(lambda: before not in pool.pids and pool._free())
    else:
        assert pool.pids == {before}


@pytest.mark.parametrize("name", ["acts", "stuck"])
async def test_a_cancelled_call_ends_its_episode(service, file, name):
    pool = service.environments[f"{file}:{name}"].pool
    call = service.stub.RunEpisode(episode(f"{file}:{name}", task={"act": "wait"}))
    await until(lambda: pool.playing == 1)
    call.cancel()
    await until(lambda: pool.playing == 0 and pool._free(), 10.0)


async def test_what_an_episode_leaves_is_cancelled(service, file, tmp_path):
    left = tmp_path / "left"
    assert only_reward(await service.play(f"{file}:acts", task={"act": "leave", "file": str(left)})) == 1.0
    await asyncio.sleep(1.5)
    assert not left.exists()


async def test_a_stopped_process_is_replaced_and_its_episodes_fail(service, file):
    pool = service.environments[f"{file}:acts"].pool
    await until(lambda: pool._free())
    playing = asyncio.create_task(service.play(f"{file}:acts", task={"act": "wait"}))
    await until(lambda: pool.playing == 1)
    (victim,) = pool.pids
    os.kill(victim, signal.SIGSTOP)
    found = (await playing).failure
    assert found.retryable and "blocked its process" in found.message
    await until(lambda: pool._free() and victim not in pool.pids)


async def test_a_prompt_that_blocked_is_played_alone_afterwards(service, file):
    pool = service.environments[f"{file}:acts"].pool
    bad = {"act": "block", "number": 1}
    await until(lambda: pool._free())
    neighbour = asyncio.create_task(service.play(f"{file}:acts", task={"act": "wait", "seconds": 5}))
    await until(lambda: pool.playing == 1)
    blamed = await failure(service, f"{file}:acts", task=bad)
    assert "the agent blocked its process" in blamed.message
    beside = (await neighbour).failure
    assert beside.retryable and "killed because another episode in it hung" in beside.message
    await until(lambda: pool._free())
    neighbour = asyncio.create_task(service.play(f"{file}:acts", task={"act": "wait", "seconds": 5}))
    await until(lambda: pool.playing == 1)
    await failure(service, f"{file}:acts", task=bad)
    assert only_reward(await neighbour) == 1.0


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"parameters": {"bonus": "much"}}, "environment.parameters.bonus: got 'much'"),
        ({"parameters": {"other": 1}}, "environment.parameters.other: got an unknown parameter"),
        ({"url": "file:///etc/passwd"}, "endpoint.base_url"),
        ({"url": "http://[::1/v1"}, "endpoint.base_url"),
        ({"url": "http://127.0.0.1:99999/v1"}, "endpoint.base_url"),
        ({"episode_id": ""}, "episode_id"),
        ({"deadline": -1.0}, "deadline"),
        ({"index": -1}, "index"),
        ({"sampling": {"temperature": -1.0}}, "sampling.temperature: got -1.0; allowed: >= 0"),
        ({"sampling": {"top_p": 1.5}}, "sampling.top_p: got 1.5; allowed: in (0, 1]"),
        ({"prompt": experience_pb2.Prompt(task="[1]")}, "prompt.task: got '[1]'; allowed: a JSON object"),
        ({"prompt": experience_pb2.Prompt(prompt_id="p")}, "prompt: got no input"),
    ],
)
async def test_an_invalid_request_is_refused_by_its_field(service, file, fields, said):
    error = await refused(service.play(f"{file}:play", **fields))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and said in error.details()


async def test_an_unknown_environment_is_named(service, file):
    error = await refused(service.play("agents.py:other"))
    assert error.code() is grpc.StatusCode.NOT_FOUND and "agents.py:other" in error.details()


async def test_more_episodes_than_its_share_come_back_later_and_another_run_plays(file):
    limits = ("environment.workers=1", "environment.max_episodes=4")
    async with serving(files(file, "acts"), *limits) as service:
        pool = service.environments[f"{file}:acts"].pool
        first = [asyncio.create_task(service.play(f"{file}:acts", task={"act": "wait", "seconds": 2})) for _ in "ab"]
        await until(lambda: pool.playing == 2)
        error = await refused(service.play(f"{file}:acts", task={"act": "nothing"}))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and retry_delay(error) > 0
        assert only_reward(await service.play(f"{file}:acts", task={"act": "nothing"}, run_id="other")) == 1.0
        assert [only_reward(each) for each in await asyncio.gather(*first)] == [1.0, 1.0]


async def test_an_episode_waits_for_a_process_that_can_take_it_and_comes_back_later_if_none_can(file, monkeypatch):
    limits = ("environment.workers=1", "environment.episodes_per_worker=1")
    async with serving(files(file, "acts"), *limits) as service:
        first = asyncio.create_task(service.play(f"{file}:acts", task={"act": "wait", "seconds": 1}))
        pool = service.environments[f"{file}:acts"].pool
        await until(lambda: pool.playing == 1)
        several = [service.play(f"{file}:acts", task={"act": "wait", "seconds": 0}) for _ in range(3)]
        assert [only_reward(each) for each in await asyncio.gather(first, *several)] == [1.0] * 4
        monkeypatch.setattr(pools, "_WAIT_SECONDS", 0.2)
        held = asyncio.create_task(service.play(f"{file}:acts", task={"act": "wait", "seconds": 600}))
        await until(lambda: pool.playing == 1)
        error = await refused(service.play(f"{file}:acts", task={"act": "nothing"}))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "can take another episode" in error.details()
        held.cancel()


async def test_a_flood_of_one_run_does_not_hold_up_another(file):
    limits = ("environment.workers=1", "environment.episodes_per_worker=2")
    async with serving(files(file, "acts"), *limits) as service:
        began = asyncio.get_running_loop().time()

        async def ended(run: str) -> float:
            answer = await service.play(f"{file}:acts", task={"act": "wait", "seconds": 0.5}, run_id=run)
            assert only_reward(answer) == 1.0
            return asyncio.get_running_loop().time() - began

        pool = service.environments[f"{file}:acts"].pool
        flood = [asyncio.create_task(ended("flood")) for _ in range(14)]
        await until(lambda: pool.playing == 2)
        other = await ended("other")
        flooded = sorted(await asyncio.gather(*flood))
        assert sum(each < other for each in flooded) <= 4  # those that played, and the turn that they were in


async def test_what_is_not_done_at_the_end_fails_and_nothing_new_begins(file):
    async with serving(files(file, "acts"), "environment.workers=1", "server.drain_seconds=4") as service:
        pool = service.environments[f"{file}:acts"].pool
        quick, slow = (
            asyncio.create_task(service.play(f"{file}:acts", task={"act": "wait", "seconds": seconds}))
            for seconds in (1, 600)
        )
        await until(lambda: pool.playing == 2)
        draining = asyncio.create_task(service.host.drain())
        await asyncio.sleep(0.2)
        error = await refused(service.play(f"{file}:acts", task={"act": "nothing"}))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert only_reward(await quick) == 1.0
        left = (await slow).failure
        assert left.retryable and "shutting down" in left.message
        await draining
        assert not pool.pids
