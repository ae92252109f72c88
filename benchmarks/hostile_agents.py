"""What agents that misbehave cost their neighbours: the p99 of an episode beside each of them.

A broker, a rollout with vLLM and its model endpoint, and an environment service with two processes for each environment
play groups of an agent that never answers, floods, raises, …, one group after the other. Meanwhile two neighbours play
one episode after the other, each a call of 8 tokens to the endpoint: one in the processes of the hostile agent, one in
those of another environment. Figures: the p99 of all their episodes, from the call of the environment service to its
answer, at most 1 s; standard error has the median, the longest one and the reason that each hostile group was given up
for. Every group must fail with the reason that is expected, or a hostile call be refused; else no figure is reported.

    .quartet/envs/dev/bin/python benchmarks/hostile_agents.py [ACT ...]

An agent that blocks its event loop, by itself or by a client that makes a request of 100 MB, holds up the episodes of
its process (docs/agents.md): beside it only the neighbour of another environment is measured.
"""

import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import grpc
from broker_processes import redis_server
from measuring import ENVIRONMENTS, ROOT, Figure, report, service
from quartet.v1 import environment_pb2, environment_pb2_grpc, experience_pb2

from quartet_client import AsyncClient
from quartet_common.config import RunSection
from quartet_common.ports import free_port

P99_LIMIT_SECONDS = 1.0
EPISODES = 200  # of the neighbours, beside one act, at least
DEADLINE_SECONDS, HANG_SECONDS, PATIENCE_SECONDS = 15.0, 5.0, 600.0
PAUSE_SECONDS = 0.02  # between two episodes of a neighbour
RUN = "hostile"
MODEL = "import sys; from model import *; save(build_model(0), build_tokenizer(), Path(sys.argv[1]))"
AGENT = """
import asyncio, math, pathlib, threading, time
import openai

async def say(endpoint, key=None, text="1+1=?"):
    async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key or endpoint.api_key, max_retries=0) as client:
        return await client.completions.create(model=endpoint.model, prompt=text, max_tokens=8)

async def neighbour(task, endpoint):
    await say(endpoint)
    return 1.0

async def play(task, endpoint):
    act, folder = task.data["act"], pathlib.Path(task.data["folder"])
    if act == "another":                # of an episode under way
        (folder / f"key-{task.index}").write_text(endpoint.api_key)
        while not (folder / "key-1").exists(): await asyncio.sleep(0.01)
        if task.index: await asyncio.sleep(600)
        await say(endpoint, (folder / "key-1").read_text())
        return 1.0
    if act == "none": await say(endpoint, "none")
    if act == "ended" and (folder.parent / "ended").exists(): await say(endpoint, (folder.parent / "ended").read_text())
    if act == "sends": await say(endpoint, text="x" * 100 * 2**20)
    if act == "asks": await say(endpoint, text="1+1=?" * 3 * 2**20)
    await say(endpoint)
    if act == "never": await asyncio.sleep(600)
    if act == "blocks": time.sleep(600)
    if act == "raises": raise KeyError("x" * 100 * 2**20)
    if act == "nan": return math.nan
    if act == "returns": return "x" * 100 * 2**20
    if act == "prints":
        for _ in range(100): print("x" * 2**20)
        raise ValueError("it has printed 100 MB")
    if act == "late": threading.Thread(target=late, args=(endpoint, folder / f"late-{task.index}")).start()
    if act == "ended": (folder.parent / "ended").write_text(endpoint.api_key)
    return 1.0

def late(endpoint, file):
    time.sleep(1.0)
    try:
        openai.OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0).models.list()
        file.write_text("it was answered")
    except openai.AuthenticationError as error:
        file.write_text(f"refused: {error}")
"""


@dataclass(frozen=True)
class Act:
    """What a hostile agent does, and the words with which its group fails, or its late call; "": nothing fails."""

    description: str
    reason: str
    blocks: bool = False
    """Whether it blocks its process for seconds."""


ACTS = {
    "quiet": Act("does nothing wrong", ""),
    "never": Act("never answers", f"took longer than its {DEADLINE_SECONDS:g} s"),
    "prints": Act("prints 100 MB", "raised ValueError: it has printed 100 MB"),
    "returns": Act("returns 100 MB", "returned 104857600 items (str)"),
    "sends": Act("sends 100 MB to the endpoint", "413", blocks=True),
    "asks": Act("asks for a continuation of 15 MB", "400"),
    "raises": Act("raises, with a message of 100 MB", "raised KeyError: 'xxx"),
    "nan": Act("returns NaN", "returned nan (float)"),
    "late": Act("calls after its end", "no API key"),
    "another": Act("uses the key of another episode", "its agent made no call to the endpoint"),
    "ended": Act("uses the key of an episode that has ended", "401"),
    "none": Act("uses no key", "401"),
    "blocks": Act("blocks its event loop", f"blocked its process for {HANG_SECONDS:.0f} s", blocks=True),
}


class Neighbour:
    """Plays one episode after the other at the environment service, with an application's key for the endpoint."""

    def __init__(self, channel: grpc.aio.Channel, environment: str, url: str, folder: Path):
        self._stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        self._request = environment_pb2.RunEpisodeRequest(
            episode_id="neighbour",
            environment=experience_pb2.EnvironmentSpec(name=environment, served=True),
            prompt=experience_pb2.Prompt(task=json.dumps({"act": "quiet", "folder": str(folder)})),
            endpoint=environment_pb2.Endpoint(base_url=url, api_key="application", model="policy"),
        )
        self.seconds: list[float] = []

    async def play(self) -> None:
        """Play until cancelled. Raises RuntimeError for an episode that fails."""
        while True:
            began = time.monotonic()
            answer = await self._stub.RunEpisode(self._request, timeout=60.0)
            if answer.WhichOneof("result") != "finished":
                raise RuntimeError(f"a neighbour's episode failed: {answer.failure.message}")
            self.seconds.append(time.monotonic() - began)
            await asyncio.sleep(PAUSE_SECONDS)


async def play_group(name: str, client: AsyncClient, folder: Path) -> str:
    """Have a group of an act played; return why it is dead, or nothing."""
    folder.mkdir()
    (handle,) = await client.submit(RUN, [{"task": {"act": name, "folder": str(folder)}}])
    (group,) = [group async for group in client.results([handle], PATIENCE_SECONDS)]
    return group.dead.reasons[-1] if group.dead else ""


async def measure(name: str, client: AsyncClient, neighbours: list[Neighbour], folder: Path) -> float:
    """Return the p99 of the neighbours' episodes while groups of an act are played, in seconds."""
    for one in neighbours:
        one.seconds.clear()
    playing = [asyncio.create_task(one.play()) for one in neighbours]
    reasons: set[str] = set()
    number = 0
    if name == "ended":
        await play_group(name, client, folder / "one-that-ends")
    try:
        while number < 3 or sum(len(one.seconds) for one in neighbours) < EPISODES:
            reasons.add(await play_group(name, client, folder / f"{name}-{number}"))
            number += 1
            for task in playing:
                if task.done():
                    task.result()  # raises its error
        if name == "late":
            await asyncio.sleep(3.0)
            reasons = {file.read_text() for file in folder.glob("late-*/late-*")}
    finally:
        for task in playing:
            task.cancel()
        await asyncio.gather(*playing, return_exceptions=True)
    wanted = ACTS[name].reason
    if not reasons or not all(wanted in reason if wanted else not reason for reason in reasons):
        raise RuntimeError(f"{name}: expected '{wanted}', got {reasons}")
    seconds = sorted(each for one in neighbours for each in one.seconds)
    shown = next(iter(reasons))[:200]
    print(
        f"{name:8} {number:3} groups; {len(seconds)} episodes of neighbours: median "
        f"{statistics.median(seconds) * 1000:.0f} ms, longest {seconds[-1] * 1000:.0f} ms; {shown}",
        file=sys.stderr,
        flush=True,
    )
    return statistics.quantiles(seconds, n=100)[98]


def start(folder: Path, files: list[str], stack: contextlib.ExitStack) -> tuple[str, str, str]:
    """Start the services, which end with the stack; return the addresses of broker, environment service, endpoint."""
    subprocess.run(
        [ENVIRONMENTS / "trainer" / "bin" / "python", "-c", MODEL, folder / "model"],
        cwd=ROOT / "examples" / "arithmetic",
        stdout=sys.stderr,
        check=True,
    )
    (folder / "keys").write_text("application\n")
    redis_url, _ = stack.enter_context(redis_server(folder))
    broker = stack.enter_context(service("broker", folder, [f"broker.redis_url={redis_url}"]))
    served = [f"environment.files={json.dumps(files)}", f"environment.hang_seconds={HANG_SECONDS}"]
    environment = stack.enter_context(service("environment", folder, served, PATIENCE_SECONDS))
    reward = stack.enter_context(service("reward", folder, [], PATIENCE_SECONDS))
    http = f"127.0.0.1:{free_port()}"
    settings = {
        "run.id": RUN,
        "model.path": folder / "model",
        "addresses.broker": broker,
        "addresses.environment": environment,
        "addresses.reward": reward,
        "rollout.engine": "vllm",
        "rollout.initial_version": 0,
        "rollout.vllm.kv_cache_gib": 0.0625,
        "rollout.http.address": http,
        "rollout.http.keys_file": folder / "keys",
    }
    given = [f"{key}={value}" for key, value in settings.items()]
    stack.enter_context(service("rollout", folder, given, PATIENCE_SECONDS))
    return broker, environment, http


async def measured(acts: list[str], folder: Path, files: list[str], broker: str, environment: str, http: str) -> None:
    """Measure beside each act, and report."""
    spec = {"file": files[0], "served": True, "answer_deadline_seconds": DEADLINE_SECONDS}
    run = RunSection(id=RUN, group_size=2, max_deliveries=1, environment=spec, sampling={"max_new_tokens": 8})
    figures = []
    async with AsyncClient(broker) as client, grpc.aio.insecure_channel(environment) as channel:
        await client.create_run(run)
        if reason := await play_group("quiet", client, folder / "first"):  # when the rollout has loaded its engine
            raise RuntimeError(f"the first group failed: {reason}")
        near, far = (Neighbour(channel, one, f"http://{http}/v1", folder) for one in files)
        for name in acts:
            p99 = await measure(name, client, [far] if ACTS[name].blocks else [near, far], folder)
            title = f"p99 of an episode beside an agent that {ACTS[name].description}"
            figures.append(Figure(title, "ms", p99 * 1000, P99_LIMIT_SECONDS * 1000, "limit", "lower"))
    report(*figures)


def main() -> None:
    acts = sys.argv[1:] or list(ACTS)
    if unknown := set(acts) - ACTS.keys():
        sys.exit(f"got {', '.join(sorted(unknown))}; allowed: {', '.join(ACTS)}")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        files = [f"{folder / 'agent.py'}:{function}" for function in ("play", "neighbour")]
        asyncio.run(measured(acts, folder, files, *start(folder, files, stack)))


if __name__ == "__main__":
    main()
