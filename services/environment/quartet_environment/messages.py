"""The contract's messages as a worker process takes and gives them."""

import json
from typing import Any

from quartet.v1 import environment_pb2, experience_pb2

from quartet_common import sampling
from quartet_common.chats import as_json
from quartet_common.durations import to_seconds
from quartet_common.errors import invalid_argument
from quartet_common.text import encodable
from quartet_common.values import is_http_url, struct_content
from quartet_environment.config import LONGEST_EPISODE_SECONDS

_LONGEST_ID = 256
# Sampling parameters that OpenAI's API has, by their names there; the others go into `extra_body`.
_OPENAI = {
    "temperature": "temperature",
    "top_p": "top_p",
    "max_new_tokens": "max_tokens",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
    "seed": "seed",
}


def read_request(request: environment_pb2.RunEpisodeRequest, ca_file: str) -> dict[str, Any]:
    """Return what the worker process is sent. Raises ContractError (INVALID_ARGUMENT) with the field."""
    if not 1 <= len(request.episode_id.encode()) <= _LONGEST_ID:
        raise invalid_argument("episode_id", f"'{request.episode_id}'", f"1 to {_LONGEST_ID} bytes")
    endpoint = request.endpoint
    if not is_http_url(endpoint.base_url):
        raise invalid_argument("endpoint.base_url", f"'{endpoint.base_url}'", "the http(s) URL of an OpenAI API")
    if not endpoint.api_key:
        raise invalid_argument("endpoint.api_key", "nothing", "the episode's key")
    if wrong := sampling.check(request.sampling):
        name, came, allowed = wrong
        raise invalid_argument(f"sampling.{name}", came, allowed)
    if request.index < 0:
        raise invalid_argument("index", request.index, "a position from 0")
    task = {**_input(request.prompt), "id": request.prompt.prompt_id, "index": request.index}
    return {
        "task": {**task, "sampling": _sampling(request.sampling)},
        "endpoint": {
            "base_url": endpoint.base_url,
            "api_key": endpoint.api_key,
            "model": endpoint.model,
            "ca_file": ca_file if endpoint.base_url.startswith("https://") else "",
        },
        "parameters": read_parameters(request.environment, "environment.parameters"),
    }


def read_parameters(of: Any, field: str) -> dict[str, Any]:
    """Return the parameters of an EnvironmentSpec or a ListTasksRequest. Raises ContractError."""
    return struct_content(of.parameters, field, invalid_argument)


def read_deadline(request: environment_pb2.RunEpisodeRequest, remaining: float | None, default: float) -> float:
    """Return the episode's time in seconds: as requested, else until the call's deadline, else `default`."""
    if not request.HasField("deadline"):
        return default if remaining is None else max(remaining, 0.0)
    seconds = to_seconds(request.deadline)
    if not 0 < seconds <= LONGEST_EPISODE_SECONDS:
        raise invalid_argument("deadline", f"{seconds:g} s", f"above 0 s, at most {LONGEST_EPISODE_SECONDS:g} s")
    return seconds


def _input(prompt: experience_pb2.Prompt) -> dict[str, Any]:
    columns = _object(prompt.columns, "prompt.columns") if prompt.columns else {}
    answer = prompt.reference.answer
    match prompt.WhichOneof("input"):
        case "task":
            data = _object(prompt.task, "prompt.task")
            messages, given = data.get("messages"), data.get("answer")
            messages = messages if isinstance(messages, list) else []
            answer = answer or (given if isinstance(given, str) else "")
            return {"data": columns | data, "messages": messages, "answer": answer}
        case "chat" if prompt.chat.messages:
            return {"data": columns, "messages": json.loads(as_json(prompt.chat)), "answer": answer}
        case "text" if prompt.text:
            return {"data": columns, "messages": [{"role": "user", "content": prompt.text}], "answer": answer}
        case kind:
            raise invalid_argument("prompt", kind or "no input", "a task, a chat or a text")


def _object(text: str, field: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise invalid_argument(field, repr(text[:80]), "a JSON object")
    return value


def _sampling(message: experience_pb2.SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as arguments of `chat.completions.create`."""
    given = {name: _shortest(value) for name, value in sampling.given(message).items() if _matters(name, value)}
    found = {theirs: given.pop(ours) for ours, theirs in _OPENAI.items() if ours in given}
    return {**found, "extra_body": given} if given else found


def _matters(name: str, value: Any) -> bool:
    field = sampling.SamplingParameters.model_fields.get(name)
    return field is not None and (name in ("temperature", "max_new_tokens") or value != field.default)


def _shortest(value: Any) -> Any:
    """Return 0.7 for the float32 nearest to it; other values as they are."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read_answer(answer: dict[str, Any]) -> environment_pb2.RunEpisodeResponse:
    """Return the response for what the worker process answered, "finished" or "failed"."""
    fields = {name: value for name, value in answer.items() if name not in ("event", "id")}
    if answer["event"] == "finished":
        return environment_pb2.RunEpisodeResponse(finished=environment_pb2.EpisodeResult(**fields))
    return environment_pb2.RunEpisodeResponse(failure=environment_pb2.EpisodeFailure(**fields))


def task_prompt(environment: str, number: int, task: dict[str, Any]) -> experience_pb2.Prompt:
    """Return a task, a JSON object, as a prompt: named by its "id", else by its position."""
    name = str(task["id"]) if isinstance(task.get("id"), str | int) else f"{environment}/{number}"
    short = encodable(name).encode()[:_LONGEST_ID].decode(errors="ignore")
    return experience_pb2.Prompt(prompt_id=short, task=json.dumps(task))
