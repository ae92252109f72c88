"""Channels to other services: security, message size, keepalive, and retries where the contract allows them.

The channel retries unary calls whose rpc has an `idempotency_level` in the protos. It does not retry streams (with
grpcio 1.85 a blocking stream whose server is killed would hang past its deadline): the readers of streams retry.
"""

import json
from collections.abc import Callable
from functools import cache
from typing import cast

import grpc
from google.protobuf.descriptor_pb2 import MethodOptions
from quartet.v1 import broker_pb2, common_pb2, environment_pb2, reward_pb2, rollout_pb2, trainer_pb2

from quartet_common import tracing
from quartet_common.certificates import ChannelT, RotatingChannel, channel_credentials, name_to_check
from quartet_common.config import SecuritySection, is_loopback

MAX_MESSAGE_BYTES = 64 << 20


@cache
def _service_config() -> str:
    names = [
        {"service": service.full_name, "method": method.name}
        for file in (common_pb2, broker_pb2, environment_pb2, reward_pb2, rollout_pb2, trainer_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.GetOptions().idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN
        and not (method.server_streaming or method.client_streaming)
    ]
    policy = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2.0,
        # CANCELLED: by a server that stops; calls that their own caller cancels are not retried.
        "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"],
    }
    # Calls, and streams when they begin, go in turn to all addresses of a name: replicas behind it share the load.
    balancing: list[dict[str, object]] = [{"round_robin": {}}]
    return json.dumps({"loadBalancingConfig": balancing, "methodConfig": [{"name": names, "retryPolicy": policy}]})


def channel_options() -> list[tuple[str, object]]:
    """Return the options of every client channel."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.service_config", _service_config()),
        # To reconnect quickly to a peer that restarts: the default backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


def connect(
    address: str,
    security: SecuritySection | None = None,
    *,
    service: str | None = None,
) -> grpc.aio.Channel:
    """Return an asyncio channel to `address` (host:port); it connects when first used.

    With TLS it reloads certificates that change on disk, and refuses a server whose certificate lacks the role
    `service`. Raises ConfigError for files that cannot be used.
    """
    security = security or SecuritySection()
    interceptors = _aio_interceptors(headers) if (headers := _headers(security)) else None

    def make(credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
        return grpc.aio.secure_channel(address, credentials, options=options, interceptors=interceptors)

    return cast(grpc.aio.Channel, _connect(make, address, security, service))


def connect_sync(
    address: str,
    security: SecuritySection | None = None,
    *,
    service: str | None = None,
) -> grpc.Channel:
    """Return a blocking channel; otherwise like `connect`."""
    security = security or SecuritySection()
    headers = _headers(security)

    def make(credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.Channel:
        if credentials is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            channel = grpc.secure_channel(address, credentials, options=options)
        return grpc.intercept_channel(channel, _SyncHeaders(headers)) if headers else channel

    return cast(grpc.Channel, _connect(make, address, security, service))


Options = list[tuple[str, object]]


def _connect(
    make: Callable[[grpc.ChannelCredentials | None, Options], ChannelT],
    address: str,
    security: SecuritySection,
    service: str | None,
) -> ChannelT | RotatingChannel[ChannelT]:
    """Return the channel that `make` makes from credentials and options; with TLS, recreated for new certificates."""
    options = channel_options()
    if is_loopback(address.rpartition(":")[0].strip("[]")):
        options.append(("grpc.enable_http_proxy", 0))  # the environment's proxy does not reach this host's own ports
    if not security.tls:
        return make(None, options)
    assert service is not None, "with TLS, the caller names the service that must answer"
    if name := name_to_check(security, address, service):
        options.append(("grpc.ssl_target_name_override", name))
    return RotatingChannel(security, lambda: make(channel_credentials(security), options))


Headers = Callable[[], list[tuple[str, str]]]


def _headers(security: SecuritySection) -> Headers | None:
    """Return a function that makes the metadata of each call, token and trace context; None if there is neither."""
    token = security.token()
    if not token and not tracing.enabled():
        return None
    authorization = [("authorization", f"Bearer {token}")] if token else []

    def headers() -> list[tuple[str, str]]:
        context = tracing.current()
        return [*authorization, (tracing.HEADER, context)] if context else authorization

    return headers


def _aio_interceptors(headers: Headers) -> list[grpc.aio.ClientInterceptor]:
    async def intercept(self, continuation, details, request):
        metadata = grpc.aio.Metadata(*(details.metadata or ()), *headers())
        return await continuation(details._replace(metadata=metadata), request)

    # grpc.aio files an interceptor under the first kind it is an instance of: one class per kind.
    kinds = {
        "unary_unary": grpc.aio.UnaryUnaryClientInterceptor,
        "unary_stream": grpc.aio.UnaryStreamClientInterceptor,
        "stream_unary": grpc.aio.StreamUnaryClientInterceptor,
        "stream_stream": grpc.aio.StreamStreamClientInterceptor,
    }
    return [type(name, (kind,), {f"intercept_{name}": intercept})() for name, kind in kinds.items()]


class _SyncHeaders(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    def __init__(self, headers: Headers):
        self._headers = headers

    def _intercept(self, continuation, details, request):
        metadata = [*(details.metadata or ()), *self._headers()]
        return continuation(details._replace(metadata=metadata), request)

    intercept_unary_unary = intercept_unary_stream = _intercept
    intercept_stream_unary = intercept_stream_stream = _intercept
