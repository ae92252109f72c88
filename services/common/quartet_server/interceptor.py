"""The interceptor of every server call: token and role checks, errors with details, metrics."""

import asyncio
import hmac
import inspect
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from quartet_common import identity, tracing
from quartet_common.errors import (
    ContractError,
    invalid_request,
    permission_denied,
    unauthenticated,
    unimplemented,
)
from quartet_common.identity import ROLE_URI, allowed_roles, is_open
from quartet_common.log import get_logger
from quartet_common.text import Repeats
from quartet_server import metrics

log = get_logger(__name__)

_CALLS = metrics.counter("quartet_grpc_calls_total", "Calls answered, by method and status code.", ["method", "code"])
_SECONDS = metrics.histogram("quartet_grpc_seconds", "Time to answer a call; streams until their end.", ["method"])

_repeats = Repeats()

# Probes carry no token.
_OPEN_PREFIX = "/grpc.health.v1.Health/"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Lets servicers raise ContractError, hides the rest as INTERNAL (it is logged), counts and times calls."""

    def __init__(self, token: str | None, roles: bool = False):
        """`token`: if set, every call must carry it. `roles`: the caller's certificate needs a role for the call."""
        self._roles = roles
        self._header = f"Bearer {token}".encode() if token else None
        # The wrapped handlers by method, and by whether they refuse the call.
        self._wrapped: dict[tuple[str, bool], grpc.RpcMethodHandler] = {}
        self._limits: dict[str, int] = {}

    def limit_requests(self, limits: Mapping[str, int]) -> None:
        """Refuse requests that have more bytes than their method's limit, before they are parsed.

        Args:
            limits: bytes by method, e.g. {"/quartet.v1.BrokerService/Heartbeat": 65536}; before the first call.
        """
        self._limits |= limits

    async def intercept_service(self, continuation, details):
        handler = await continuation(details)
        if handler is None:
            return None
        refused = not details.method.startswith(_OPEN_PREFIX) and not self._authorised(details)
        found = self._wrapped.get((details.method, refused))
        if found is None:
            found = self._wrapped[details.method, refused] = self._wrap(handler, details.method, refused)
        return found

    def _wrap(self, handler: grpc.RpcMethodHandler, method: str, refused: bool) -> grpc.RpcMethodHandler:
        make, inner = _parts(handler)
        allowed = allowed_roles(method) if self._roles and not is_open(method) else None
        check = _checked_stream if handler.request_streaming else _checked

        if handler.response_streaming:

            async def answer_stream(request, context):
                async with _Guard(method, context, refused, allowed):
                    result = inner(check(request), context)
                    if inspect.isasyncgen(result) or hasattr(result, "__aiter__"):
                        async for message in result:
                            yield message
                    else:
                        await result  # the servicer writes to the context itself

            wrapped = answer_stream
        else:

            async def answer(request, context):
                async with _Guard(method, context, refused, allowed):
                    with _traced(method, context):
                        return await inner(check(request), context)

            wrapped = answer
        return make(
            wrapped,
            request_deserializer=_parser_or_error(handler.request_deserializer, self._limits.get(method)),
            response_serializer=_serializer_or_bytes(handler.response_serializer),
        )

    def _authorised(self, details) -> bool:
        if self._header is None:
            return True
        for key, value in details.invocation_metadata or ():
            if key == "authorization":
                came = value.encode() if isinstance(value, str) else value
                return hmac.compare_digest(came, self._header)
        return False


def _traced(method: str, context: grpc.aio.ServicerContext) -> AbstractContextManager[object]:
    """Trace a unary call whose caller is traced. A stream belongs to many traces, so it gets no span."""
    if not tracing.enabled():
        return nullcontext()
    for key, value in context.invocation_metadata() or ():
        if key == tracing.HEADER and isinstance(value, str) and tracing.is_valid(value):
            return tracing.span(method.removeprefix("/"), value, kind="server", attributes={"rpc.system": "grpc"})
    return nullcontext()


def _parts(handler: grpc.RpcMethodHandler):
    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler, handler.stream_stream
    if handler.request_streaming:
        return grpc.stream_unary_rpc_method_handler, handler.stream_unary
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler, handler.unary_stream
    return grpc.unary_unary_rpc_method_handler, handler.unary_unary


def _parser_or_error(parse: Callable[[bytes], Any] | None, most: int | None) -> Callable[[bytes], Any] | None:
    """Return a parser that yields a ContractError in place of a request it cannot parse or that is too large.

    The handler raises it: gRPC itself answers UNKNOWN if a parser raises.
    """
    if parse is None:
        return None

    def parse_or_error(data: bytes) -> Any:
        if most is not None and len(data) > most:  # parsing would block the event loop
            return invalid_request(f"request: got {len(data)} bytes; allowed: at most {most} bytes")
        try:
            return parse(data)
        except DecodeError as error:
            return invalid_request(f"the bytes sent are no message of the call's request type: {error}")

    return parse_or_error


def _serializer_or_bytes(serialize: Callable[[Any], bytes] | None) -> Callable[[Any], bytes] | None:
    """Return a serializer that passes bytes through: servicers may return messages that are serialized already."""
    if serialize is None:
        return None
    return lambda message: message if isinstance(message, bytes) else serialize(message)


def _checked(request: Any) -> Any:
    if isinstance(request, ContractError):
        raise request
    return request


async def _checked_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _checked(request)


def _refusal(error: BaseException) -> ContractError | None:
    """Return the ContractError that was raised, alone or in an exception group; None for any other error."""
    if isinstance(error, BaseExceptionGroup):
        found = [_refusal(each) for each in error.exceptions]
        return found[0] if all(found) else None
    return error if isinstance(error, ContractError) else None


class _Guard:
    """Wraps one call: refuses it, or turns what it raises into a status; counts it."""

    def __init__(self, method: str, context: grpc.aio.ServicerContext, refused: bool, allowed: frozenset[str] | None):
        self._method, self._context, self._refused, self._allowed = method, context, refused, allowed
        self._began = time.perf_counter()

    async def __aenter__(self) -> None:
        if self._refused:
            error = unauthenticated("got no valid token; send the metadata 'authorization: Bearer TOKEN'")
            await self._turn_away(error, frozenset())
        if self._allowed is not None:
            caller = identity.of_certificate(self._context.auth_context())
            if not caller.roles & self._allowed:
                await self._turn_away(self._forbidden(caller.roles), caller.roles)
            identity.begin(caller)

    def _forbidden(self, roles: frozenset[str]) -> ContractError:
        allowed = ", ".join(sorted(self._allowed or ()))
        came = f"the role {', '.join(sorted(roles))}" if roles else f"no role (a URI {ROLE_URI}NAME)"
        return permission_denied(self._method, f"the caller's certificate has {came}; allowed: {allowed}")

    async def _turn_away(self, error: ContractError, roles: frozenset[str]) -> None:
        """Refuse a call, and log the refusal at most once a minute per caller and method."""
        caller, code = identity.peer_of(self._context), error.code.name
        if (repeated := _repeats.count((caller, self._method, code))) is not None:
            what: dict[str, Any] = {
                "method": self._method,
                "code": code,
                "roles": ", ".join(sorted(roles)),
                "caller": caller,
            }
            what |= {"peer": self._context.peer(), "reason": error.message, "repeated": repeated}
            log.warning("call refused", extra=what)
        await self._abort(error)

    async def __aexit__(self, kind, error, trace) -> None:
        if error is None:
            code = self._context.code()
            self._count(grpc.StatusCode(code).name if code else "OK")
        elif (refusal := _refusal(error)) is not None:
            await self._abort(refusal)
        elif isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            self._count("CANCELLED")
        elif isinstance(error, grpc.aio.AbortError):
            self._count("ABORT")
        elif isinstance(error, NotImplementedError) and self._context.code() is grpc.StatusCode.UNIMPLEMENTED:
            # A generated method that this build's servicer does not override.
            await self._abort(unimplemented(self._method, "this build of the service does not have it"))
        else:
            log.exception("call failed", exc_info=error, extra={"method": self._method})
            self._count("INTERNAL")
            await self._context.abort(
                grpc.StatusCode.INTERNAL, f"{self._method} failed inside the service; its log has the details"
            )

    async def _abort(self, error: ContractError) -> None:
        self._count(error.code.name)
        await self._context.abort(error.code, error.message, error.trailing_metadata())

    def _count(self, code: str) -> None:
        _CALLS.labels(self._method, code).inc()
        _SECONDS.labels(self._method).observe(time.perf_counter() - self._began)
