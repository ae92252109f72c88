"""Environments of the package `verifiers` 0.4 by the id of their taskset: its tasks, and an episode of one of them.

verifiers calls a failure an episode with a reward where a stage timed out, a call failed or a seat never spoke. Such an
episode raises here instead.
"""

import asyncio
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

import certifi
import verifiers.v1 as vf
from pydantic import AfterValidator, Field, ValidationInfo
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config, taskset_class

from quartet_environment.agent import Endpoint, Reward, Seat, Task
from quartet_environment.packages.chat_harness import HARNESS_ID

_REPLACED = ("bash", "null")  # harnesses that start a process for each turn
_NUMBERS = itertools.count()
_BLAMELESS = frozenset({"InterceptionError", "TunnelError", "SandboxError", "ToolsetError", "HarnessError"})
"""Errors of what surrounds a task: the episode may be played again. verifiers/v1/errors.py has all."""
_SERVICE_UNAVAILABLE, _GATEWAY_TIMEOUT = 503, 504

_served: dict[str, "asyncio.Task[None]"] = {}
_ready: dict[str, "asyncio.Future[vf.Env]"] = {}


class NotTrusted(Exception):
    """An episode whose reward counts for nothing."""

    def __init__(self, reason: str, status_code: int | None = None):
        """`status_code`: of the answer that it failed by, which says whether another try may go well."""
        super().__init__(reason)
        self.status_code = status_code


def _config(taskset_id: str, taskset: Mapping[str, Any] | None, env: Mapping[str, Any] | None) -> vf.EnvConfig:
    """Return verifiers' own configuration of an environment. Raises ValueError for what it does not know.

    Seats that say nothing of it, or have verifiers' harness for plain chats, get ours, in this process.
    """
    block = {**(env or {}), "taskset": {**(taskset or {}), "id": taskset_id}}
    for name, one in {"env": block, **block}.items():
        if isinstance(one, Mapping) and "retries" in one:
            raise ValueError(f"{name}.retries is set; allowed: none, the run tries again (run.max_deliveries)")
    config = resolve_env_config(block)
    for name, agent in agent_config_fields(config).items():
        given = dict(block.get(name) or {})
        harness = agent.harness.id if agent.harness is not None else default_harness_id(taskset_id)
        if harness in _REPLACED and "harness" not in given:
            given["harness"] = {"id": HARNESS_ID}
        if agent.runtime == vf.PrimeConfig():  # verifiers' default: a machine of a cloud
            given.setdefault("runtime", {"type": "subprocess"})
        block[name] = {**given, "retries": {"max_retries": 0}}
    return resolve_env_config(block)


def _checked(check: Callable[[Any, ValidationInfo], Any]) -> AfterValidator:
    """A check of a parameter, in the dry run as well, by what verifiers raises."""

    def checked(value: Any, info: ValidationInfo) -> Any:
        try:
            check(value, info)
        except Exception as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error
        return value

    return AfterValidator(checked)


def _check_env(env: dict[str, Any] | None, info: ValidationInfo) -> None:
    if "id" in info.data:
        _config(info.data["id"], info.data["taskset"], env)


def _check_trainable(trainable: list[str] | None, info: ValidationInfo) -> None:
    if trainable is None or not {"id", "env"} <= info.data.keys():
        return
    seats = agent_config_fields(_config(info.data["id"], info.data["taskset"], info.data["env"]))
    own = [name for name, seat in seats.items() if seat.client is None]
    if not trainable or not set(trainable) <= set(own):
        raise ValueError(f"allowed are seats of the environment: {', '.join(own) or 'none'}")


TasksetId = Annotated[str, _checked(lambda taskset_id, info: taskset_class(taskset_id))]
EnvBlock = Annotated[dict[str, Any] | None, Field(validate_default=True), _checked(_check_env)]
Trainable = Annotated[list[str] | None, _checked(_check_trainable)]


def tasks(*, id: str, taskset: dict[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Yield the taskset's tasks as its own data, JSON objects."""
    loaded = taskset_class(id)(_config(id, taskset, None).taskset)
    fields = type(loaded).task_type().data_type().model_fields
    if left_out := [name for name, field in fields.items() if field.exclude]:
        raise ValueError(f"tasks of '{id}' have {', '.join(left_out)} outside their JSON; allowed: what can be sent")
    for task in loaded:
        yield task.data.model_dump(mode="json")


async def play(
    task: Task,
    endpoint: Endpoint,
    *,
    id: TasksetId,
    taskset: dict[str, Any] | None = None,
    env: EnvBlock = None,
    trainable: Trainable = None,
    tokenizer: str = "",
    renderer: dict[str, Any] | None = None,
) -> Reward:
    """An environment of the package verifiers.

    Args:
        id: of the taskset, an installed module.
        taskset: its other settings.
        env: verifiers' own [env] block: the environment's id, seats by their names, timeouts.
        trainable: seats to train; None: those that the environment trains.
        tokenizer: folder of the model's tokenizer; with it, conversations are rendered here, by the package renderers,
            and go to the endpoint as tokens. "": they go as chats.
        renderer: settings of the renderer: its name and more. None: by the tokenizer's name.

    Raises NotTrusted for an episode whose reward counts for nothing.
    """
    config = _config(id, taskset, env)
    environment = await _environment(config)
    task_type = type(environment.taskset).task_type()
    played = task_type(task_type.data_type().model_validate(task.data), config.taskset.task)
    _trust(endpoint.ca_file)
    with _key_in_variable(endpoint.api_key) as variable:
        to = {"base_url": endpoint.base_url, "api_key_var": variable}
        client: vf.ClientConfig = vf.EvalClientConfig(**to)
        if tokenizer:
            client = vf.TrainClientConfig(**to, renderer_model_name=tokenizer, renderer=renderer)
        # The endpoint has the run's sampling for what is not said.
        sampling = vf.SamplingConfig(max_tokens=task.sampling.get("max_tokens"))
        episode = await environment.run_episode(played, vf.ModelContext(endpoint.model, client, sampling))
    own = [name for name, seat in agent_config_fields(config).items() if seat.client is None]
    trained = [
        trace
        for trace in episode.traces
        if (trace.agent.name in trainable if trainable else trace.agent.trainable and trace.agent.name in own)
    ]
    _check(episode, trained)
    notes = "; ".join(f"{one.agent.name}: {one.num_turns} turns, {one.stop_condition}" for one in episode.traces)
    return Reward(seats=list(_seats(episode, trained)), notes=notes)


def _check(episode: vf.Episode, trained: list[vf.Trace]) -> None:
    """Raises NotTrusted unless the episode was played to its end without a fault, and each trained seat spoke."""
    late = [f"seat '{one.agent.name}' ended by {one.stop_condition}" for one in episode.traces if one.is_timeout]
    if late or episode.is_timeout:
        raise NotTrusted(", ".join(late) or episode.errors[-1].message, _GATEWAY_TIMEOUT)
    errors = [
        *(error for trace in episode.traces for call in trace.calls if (error := call.error) is not None),
        *(error for trace in episode.traces for error in trace.errors),
        *episode.errors,
    ]
    if errors:
        status = errors[0].status_code
        if status is None and errors[0].type in _BLAMELESS:
            status = _SERVICE_UNAVAILABLE
        raise NotTrusted(f"{errors[0].type}: {errors[0].message}", status)
    if not episode.ok:
        raise NotTrusted("verifiers says that it did not go well, and no more")
    if not trained:
        raise NotTrusted(f"none of its seats is trainable: {', '.join(episode.by_agent)}")
    for trace in trained:
        if trace.usage is None or not trace.usage.completion_tokens:
            raise NotTrusted(f"seat '{trace.agent.name}' sampled no token", _SERVICE_UNAVAILABLE)  # by chance
        if unscored := [name for name, reward in trace.rewards.items() if reward is None]:
            raise NotTrusted(f"seat '{trace.agent.name}' was not scored by {', '.join(unscored)}")


def _seats(episode: vf.Episode, trained: list[vf.Trace]) -> Iterator[Seat]:
    """Yield a seat for each trace: a role that is played several times has them numbered."""
    for name, traces in episode.by_agent.items():
        for number, trace in enumerate(traces):
            rewards = {name: (one.score, one.weight) for name, one in trace.rewards.items() if one is not None}
            trains = any(trace is one for one in trained)
            yield Seat(
                name if len(traces) == 1 else f"{name}/{number}",
                rewards if trains else rewards or None,
                sessions=[trace.id],
                trainable=trains,
            )


async def _environment(config: vf.EnvConfig) -> vf.Env:
    """Return the environment of a configuration, which this process keeps, with the tool servers that tasks share."""
    key = config.model_dump_json()
    if key not in _served or _served[key].done():
        _ready[key] = asyncio.get_running_loop().create_future()
        # In an empty context: a task made in that of an episode ends with the episode.
        _served[key] = Context().run(asyncio.create_task, _serve(config, _ready[key]))
    return await asyncio.shield(_ready[key])


async def _serve(config: vf.EnvConfig, ready: "asyncio.Future[vf.Env]") -> None:
    try:
        environment = await asyncio.to_thread(load_environment, config)  # imports for seconds
        async with environment.serving():
            # verifiers 0.4 (v1/env.py, Env.serving) shares one server among all rollouts, which keeps a connection pool
            # for each episode's key. Without it each rollout has a server of its own, which ends with it.
            environment._interception = None
            ready.set_result(environment)
            await asyncio.Event().wait()
    except Exception as error:
        ready.set_exception(error)


@contextmanager
def _key_in_variable(key: str) -> Iterator[str]:
    """The name of an environment variable with the key: verifiers reads it there, and hides it from tools (API_KEY)."""
    name = f"QUARTET_API_KEY_{next(_NUMBERS)}"
    os.environ[name] = key
    try:
        yield name
    finally:
        del os.environ[name]


@cache
def _trust(ca_file: str) -> None:
    """Have verifiers' clients, which take no authority, trust this one beside those that they trust."""
    if ca_file:
        trusted = os.environ.get("SSL_CERT_FILE") or certifi.where()
        with NamedTemporaryFile(prefix="quartet-", suffix=".pem", delete=False) as bundle:
            bundle.write(Path(trusted).read_bytes() + b"\n" + Path(ca_file).read_bytes())
        os.environ["SSL_CERT_FILE"] = bundle.name
