"""The gate before vLLM's OpenAI server: which requests come in, and for whom."""

import hmac
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
from google.rpc import error_details_pb2

from quartet_common.errors import ContractError
from quartet_rollout.agents.episodes import CALLER, AgentEpisode, Caller, Episodes
from quartet_rollout.direct import DirectAdmission
from quartet_rollout.engines.base import UNKNOWN_VERSION
from quartet_rollout.environments.episode import TURN_SEEDS
from quartet_rollout.state import RolloutState

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

COMPLETIONS, TOKENS_IN = "/v1/completions", "/inference/v1/generate"
GENERATING = ("/v1/chat/completions", COMPLETIONS, "/v1/responses", TOKENS_IN)
"""Paths that sample, by POST."""
READING = ("/v1/models", "/tokenize", "/detokenize", "/version")
"""Paths that read. None that changes weights, adapters or the engine is let through."""
LARGEST_REQUEST = 16 << 20
_RETRY_SECONDS = 1


class Refusal(Exception):
    """An answer in OpenAI's form instead of the server's."""

    def __init__(self, status: int, message: str, parameter: str | None = None, retry: bool = False):
        super().__init__(message)
        self.status, self.parameter, self.retry = status, parameter, retry

    async def send(self, send: Send) -> None:
        """Send it."""
        kind = "invalid_request_error" if self.status < 500 else "unavailable"
        error = {"message": str(self), "type": kind, "param": self.parameter, "code": self.status}
        body = json.dumps({"error": error}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if self.retry:
            headers.append((b"retry-after", str(_RETRY_SECONDS).encode()))
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Gate:
    """An ASGI application before vLLM's."""

    def __init__(
        self, app: App, state: RolloutState, admission: DirectAdmission, episodes: Episodes, keys: Sequence[str]
    ):
        """`keys`: of applications, which use the live policy; nothing of theirs is recorded."""
        self._app, self._state, self._admission, self._episodes = app, state, admission, episodes
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        except Refusal as refusal:
            await refusal.send(send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"].rstrip("/"), scope["method"]
        if path == "/health":
            self._check_serving()
            await self._app(scope, receive, send)
            return
        generates = path in GENERATING and method == "POST"
        if not generates and path not in READING:
            served = ", ".join(f"POST {one}" for one in GENERATING)
            raise Refusal(404, f"{method} {path} is not served here; served: {served}, {', '.join(READING)}")
        caller = self._caller(dict(scope["headers"]))
        self._check_serving()
        token = CALLER.set(caller)
        try:
            if generates:
                await self._generate(path, caller, scope, receive, send)
            else:
                await self._app(scope, receive, send)
        finally:
            CALLER.reset(token)

    def _caller(self, headers: dict[bytes, bytes]) -> Caller:
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        key = bearer.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        episode = self._episodes.find(key.decode("latin-1"))
        if episode is None and not any(hmac.compare_digest(key, one) for one in self._keys):
            raise Refusal(401, "no API key of an application or of an episode under way: Authorization: Bearer KEY")
        return Caller(episode, headers.get(b"x-session-id", b"").decode("latin-1"))

    def _check_serving(self) -> None:
        state = self._state
        if state.draining:
            raise Refusal(503, "the rollout is stopping; ask another", retry=True)
        if state.sleep_level:
            raise Refusal(503, "the rollout sleeps; ask another, or later", retry=True)
        if state.policy_version == UNKNOWN_VERSION:
            raise Refusal(503, "the rollout has no weights of a known version yet", retry=True)

    async def _generate(self, path: str, caller: Caller, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        parameters = body
        if path == TOKENS_IN:
            send = _with_token_names(send)
            parameters = body.get("sampling_params", {})
            if not isinstance(parameters, dict):
                came = type(parameters).__name__
                raise Refusal(400, f"sampling_params is of type {came}; allowed: an object", "sampling_params")
        async with AsyncExitStack() as admitted:
            if caller.episode is None:
                try:
                    await admitted.enter_async_context(self._admission.entered(_completions(parameters)))
                except ContractError as error:
                    raise _not_admitted(error) from error
            else:
                if path == TOKENS_IN:
                    body["sampling_params"] = parameters
                if path in (COMPLETIONS, TOKENS_IN) and parameters.get("max_tokens") is None:
                    # vLLM (entrypoints/openai/completion/protocol.py, sampling_params.py) ends an answer after 16
                    # tokens by default.
                    parameters["max_tokens"] = caller.episode.settings.max_new_tokens
                if body.get("use_beam_search"):
                    # Its tokens are chosen among several that were sampled.
                    said = "use_beam_search is set; allowed in an episode: unset"
                    raise Refusal(400, said, "use_beam_search")
                _use_sampling(parameters, caller.episode)
            data = json.dumps(body).encode()
            await self._app(_resized(scope, len(data)), _replayed(data, receive), send)


async def _body(receive: Receive) -> dict[str, Any]:
    """Read a request's JSON object. Raises Refusal."""
    data = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refusal(400, "the request ended before its body")
        data += message.get("body", b"")
        if len(data) > LARGEST_REQUEST:
            raise Refusal(413, f"the request has more than {LARGEST_REQUEST} bytes")
        if not message.get("more_body"):
            break
    try:
        body = json.loads(bytes(data), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the request is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(400, f"the request is JSON of type {type(body).__name__}; allowed: an object")
    return body


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number; allowed: finite ones")


def _completions(parameters: dict[str, Any]) -> int:
    """Return how many completions a request asks for, as vLLM's server reads it; 1 if it will refuse it."""
    prompts = parameters.get("prompt")
    several = sum(not isinstance(one, int) for one in prompts) if isinstance(prompts, list) else 1
    try:
        n = int(parameters.get("n") or 1)
    except (TypeError, ValueError, OverflowError):
        n = 1
    return max(1, n) * max(1, several)  # a list of integers is one prompt


def _not_admitted(error: ContractError) -> Refusal:
    if error.code is grpc.StatusCode.UNAVAILABLE:
        return Refusal(503, error.message, retry=True)
    later = any(isinstance(detail, error_details_pb2.RetryInfo) for detail in error.details)
    return Refusal(429 if later else 400, error.message, retry=later)


def _use_sampling(body: dict[str, Any], episode: AgentEpisode) -> None:
    """Fill in the sampling of the episode where the request says nothing; vLLM's server would use its own defaults."""
    settings = episode.settings
    given = settings.model_dump(
        mode="json", exclude_defaults=True, exclude={"max_new_tokens", "masks", "routed_experts"}
    )
    if settings.seed is not None:
        given["seed"] = (settings.seed + episode.begun * TURN_SEEDS) % 2**63
    for name in ("temperature", "top_p", "top_k", "min_p"):
        given[name] = getattr(settings, name)
    for name, value in given.items():
        if body.get(name) is None:
            body[name] = value


def _resized(scope: Scope, size: int) -> Scope:
    headers = [
        (name, value) for name, value in scope["headers"] if name not in (b"content-length", b"content-encoding")
    ]
    return {**scope, "headers": [*headers, (b"content-length", str(size).encode())]}


def _replayed(data: bytes, receive: Receive) -> Receive:
    """A request's body that was read already; afterwards what comes, which is the disconnect."""
    left = [{"type": "http.request", "body": data, "more_body": False}]

    async def replay() -> dict[str, Any]:
        return left.pop() if left else await receive()

    return replay


def _with_token_names(send: Send) -> Send:
    """Add `token`, "token_id:ID", to the log-probs of a JSON answer: clients of `renderers` read it, and vLLM 0.32
    (entrypoints/scale_out/token_in_token_out/protocol.py) sends `token_id` alone. Streams pass as they are."""
    start: dict[str, Any] = {}
    data = bytearray()

    async def changed(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
            if not _is_json(message):
                await send(message)
            return
        if not _is_json(start):
            await send(message)
            return
        data.extend(message.get("body", b""))
        if message.get("more_body"):
            return
        body = _named(bytes(data))
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await send({"type": "http.response.body", "body": body})

    return changed


def _is_json(start: dict[str, Any]) -> bool:
    return dict(start["headers"]).get(b"content-type", b"").startswith(b"application/json")


def _named(data: bytes) -> bytes:
    body = json.loads(data)
    for choice in body.get("choices") or ():
        for one in (choice.get("logprobs") or {}).get("content") or ():
            if "token_id" in one:
                one.setdefault("token", f"token_id:{one['token_id']}")
    return json.dumps(body).encode()
