"""A whole rollout with vLLM and its model endpoint, between a broker and an environment service of the test."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
import torch
import world as worlds
from doubles import InTestBroker, quiet_host
from models import VOCAB_SIZE, write_model
from quartet.v1 import broker_pb2, environment_pb2, environment_pb2_grpc, experience_pb2
from transformers import AutoModelForCausalLM

from quartet_common.config import AddressesSection
from quartet_common.durations import to_duration
from quartet_common.ports import free_port
from quartet_rollout.agents.episodes import AgentEpisode
from quartet_rollout.engines import create_engine
from quartet_rollout.engines.base import SamplingSettings

TEMPLATE = (
    "{% for m in messages %}<think>{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<think>assistant:{% endif %}"
)
PATIENCE = 240.0
"""Seconds until everything is there: generous, since machines that run tests are busy."""
SAID = [{"role": "user", "content": "hi"}]
Request = environment_pb2.RunEpisodeRequest
Response = environment_pb2.RunEpisodeResponse
WORDLESS = range(95, VOCAB_SIZE)
"""Special tokens and ids without a text: what an agent sends back lacks them."""


def finished(*rewards: float, turns: tuple[float, ...] = (), seats: int = 1, **seat: Any) -> Response:
    names = [{"name": f"part{n}", "value": value} for n, value in enumerate(rewards)]
    given = [{"turn": n, "value": value} for n, value in enumerate(turns)]
    one = {"trainable": True, "rewards": names, "turns": given, **seat}
    several = [environment_pb2.SeatResult(name=f"seat-{n}" if seats > 1 else "", **one) for n in range(seats)]
    return Response(finished=environment_pb2.EpisodeResult(seats=several, notes="it was played"))


def failed(message: str, retryable: bool) -> Response:
    return Response(failure=environment_pb2.EpisodeFailure(message=message, retryable=retryable))


class InTestEnvironment(environment_pb2_grpc.EnvironmentServiceServicer):
    """Plays as the test says."""

    def __init__(self) -> None:
        self.play: Callable[[Request], Awaitable[Response]] = talk
        self.keys: list[str] = []

    async def RunEpisode(self, request: Request, context: grpc.aio.ServicerContext) -> Response:
        self.keys.append(request.endpoint.api_key)
        return await self.play(request)


def policy(request: Request) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=request.endpoint.base_url, api_key=request.endpoint.api_key, max_retries=0)


async def say(request: Request, messages: list[Any], **body: Any) -> str:
    async with policy(request) as client:
        model = request.endpoint.model
        answer = await client.chat.completions.create(model=model, messages=messages, **body)
    return answer.choices[0].message.content or ""


async def talk(request: Request) -> Response:
    """Two turns; the reward is the episode's index."""
    messages: list[Any] = [{"role": "user", "content": json.loads(request.prompt.task)["question"]}]
    for _ in range(2):
        messages.append({"role": "assistant", "content": await say(request, messages)})
        messages.append({"role": "user", "content": "and then?"})
    return finished(float(request.index))


class Playing:
    """A rollout with an endpoint, between a broker and an environment service."""

    def __init__(self, world: worlds.World, environment: InTestEnvironment, run: Callable[..., Any]):
        assert world.service is not None and world.service.state.engine is not None
        self.broker, self.reward, self.environment, self._run = world.broker, world.reward, environment, run
        self.state, self.engine, self.episodes = (
            world.service.state,
            world.service.state.engine,
            world.service._episodes,
        )
        self.model = world.folder / "chat"
        self.url = f"http://{world.service._config.section.http.address}"
        self._numbers = itertools.count()

    def open(self, calls: int = 8, **sampling: Any) -> AgentEpisode:
        """Begin an episode of which nobody but the test knows."""
        return self.episodes.open(SamplingSettings(**{"max_new_tokens": 16, **sampling}), calls)

    def log_probs(self, prompt: Any, row: Any, temperature: float = 1.0, bias: Iterable[int] = ()) -> np.ndarray:
        """The log-prob of each token of `row` after `prompt`, computed by transformers; `bias`: tokens at -100."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        tokens = torch.tensor([*map(int, prompt), *map(int, row)])
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].double()
        logits[:, list(bias)] -= 100.0
        of_next = torch.log_softmax(logits / temperature, dim=-1)[len(prompt) - 1 : -1]
        return of_next.gather(1, tokens[len(prompt) :, None])[:, 0].numpy()

    async def post(self, path: str, key: str, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            headers = {"authorization": f"Bearer {key}"} if key else {}
            return await client.post(path, headers=headers, json={"model": "policy", **body})

    async def chat(self, key: str, **body: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", key, **{"messages": SAID, **body})

    def put(self, play: Callable[[Request], Awaitable[Response]] = talk, **spec: Any) -> broker_pb2.PutGroup:
        """Have one group played; return what was put."""
        return self._run(self._settled(play, spec, lambda: self.broker.puts))

    def release(self, play: Callable[[Request], Awaitable[Response]], **spec: Any) -> broker_pb2.LeaseRelease:
        """As `put`, for a lease that is given back."""
        return self._run(self._settled(play, spec, lambda: self.broker.releases))

    async def _settled(self, play: Any, spec: dict[str, Any], settled: Callable[[], list[Any]]) -> Any:
        self.environment.play = play
        before = len(settled())
        environment = experience_pb2.EnvironmentSpec(
            **{"name": "agent.py:play", "served": True, "max_turns": 4, "answer_deadline": to_duration(20.0), **spec}
        )
        prompt = experience_pb2.Prompt(task=json.dumps({"question": "why?"}), environment=environment)
        prompt.sampling.max_new_tokens = 8
        prompt.sampling.logit_bias.update(dict.fromkeys(WORDLESS, -100.0))
        instance = experience_pb2.PromptInstance(
            instance_id=f"pass-0/{next(self._numbers)}", prompt=prompt, purpose=experience_pb2.PURPOSE_TRAIN
        )
        await self.broker.submit(instance)
        await self.broker.until(lambda: len(settled()) > before, timeout=40)
        return settled()[-1]


@asynccontextmanager
async def playing_in(folder: Path, run: Callable[..., Any]) -> AsyncIterator[Playing]:
    """Start everything, with files in `folder`."""
    model = write_model(folder / "chat", tied=True, seed=0)
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    (folder / "keys").write_text("application\n")
    environment, host = InTestEnvironment(), quiet_host("environment")
    environment_pb2_grpc.add_EnvironmentServiceServicer_to_server(environment, host.server)
    await host.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AddressesSection.model_fields["environment"], "default", host.address)
        AddressesSection.model_rebuild(force=True)
        broker = InTestBroker()
        broker.create_run()
        async with worlds.neighbors(folder, broker) as make:
            world = make()
            options = {"kv_cache_gib": 0.0625, "max_num_seqs": 64, "max_num_batched_tokens": 4096}
            world.engine = create_engine("vllm", str(model), options)  # type: ignore[assignment]
            http = {"address": f"127.0.0.1:{free_port()}", "keys_file": folder / "keys", "max_tokens": 32}
            await world.start(drain_seconds=60, engine="vllm", http=http, initial_version=3)
            await world.until(lambda: world.service.state.may_lease, PATIENCE)
            yield Playing(world, environment, run)
            await world.stop()
    await host.drain()
