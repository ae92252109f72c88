"""A server as somebody sees it who knows a released contract and nothing newer.

It stands between a client and a server and passes calls on. Each message is read with the classes of the released
descriptor image (`protos/released/*.binpb`), what that release does not know is dropped, and RPCs that it does not have
are UNIMPLEMENTED. To a server it is an old client; to a client it is an old server.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

RELEASED = sorted((Path(__file__).resolve().parents[2] / "protos" / "released").glob("*.binpb"))
"""The descriptor images, oldest first."""

_SECONDS = 60.0
_HEALTH = "/grpc.health.v1.Health/Check"  # another contract, which does not change
_DROPPED = frozenset({"user-agent"})  # made anew by the channel
_SERVICES = ("Broker", "Reward", "Rollout", "Trainer", "Handshake")


@dataclass(frozen=True)
class Method:
    """An RPC of a release."""

    path: str
    request: type[Message]
    response: type[Message]
    client_streaming: bool
    server_streaming: bool


class ReleasedContract:
    """The RPCs and messages of a descriptor image."""

    def __init__(self, image: Path):
        files = FileDescriptorSet.FromString(image.read_bytes())
        pool = DescriptorPool()
        for file in files.file:
            pool.Add(file)
        self.name = image.stem
        self.methods: dict[str, Method] = {}
        for name in _SERVICES:
            service = pool.FindServiceByName(f"quartet.v1.{name}Service")
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
                self.methods[path] = Method(path, request, response, method.client_streaming, method.server_streaming)

    @property
    def rpcs(self) -> set[str]:
        """Names like "BrokerService.CreateRun"."""
        return {path[1:].removeprefix("quartet.v1.").replace("/", ".") for path in self.methods}

    def knows(self, rpc: str, message: Message) -> bool:
        """Return whether a request of today says nothing that this release does not know."""
        service, _, name = rpc.partition(".")
        method = self.methods.get(f"/quartet.v1.{service}/{name}")
        return (
            method is not None
            and type(message).FromString(seen(method.request, message.SerializeToString())) == message
        )


def seen(known: type[Message], data: bytes) -> bytes:
    """Return what a release sees of a message."""
    message = known.FromString(data)
    message.DiscardUnknownFields()
    return message.SerializeToString()


class ReleasedView(grpc.GenericRpcHandler):
    """Passes calls on to a server, through the eyes of a release."""

    def __init__(self, contract: ReleasedContract, target: str):
        """Listen on a free port of this host; calls go on to `target` (host:port)."""
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self.contract = contract
        self._channel = grpc.insecure_channel(target, options=options)
        # Streams that stay open hold a thread each.
        self._server = grpc.server(ThreadPoolExecutor(32), handlers=[self], options=options)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        """Stop; calls under way are cancelled."""
        self._server.stop(grace=None).wait(10)
        self._channel.close()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """As gRPC asks for it. None: UNIMPLEMENTED."""
        if details.method == _HEALTH:
            onward = self._channel.unary_unary(_HEALTH)
            return grpc.unary_unary_rpc_method_handler(lambda request, context: onward(request, timeout=_left(context)))
        method = self.contract.methods.get(details.method)
        if method is None:
            return None
        kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
        onward = getattr(self._channel, kind)(method.path)
        answer = self._stream(onward, method) if method.server_streaming else self._unary(onward, method)
        return getattr(grpc, f"{kind}_rpc_method_handler")(answer)

    def _unary(self, onward: Callable, method: Method) -> Callable:
        def answer(request, context: grpc.ServicerContext) -> bytes:
            call = onward.future(_request(request, method), timeout=_left(context), metadata=_metadata(context))
            context.add_callback(call.cancel)
            try:
                return seen(method.response, call.result())
            except grpc.RpcError as error:
                return _refuse(context, error)

        return answer

    def _stream(self, onward: Callable, method: Method) -> Callable:
        def answer(request, context: grpc.ServicerContext) -> Iterator[bytes]:
            call = onward(_request(request, method), timeout=_left(context), metadata=_metadata(context))
            context.add_callback(call.cancel)
            try:
                for message in call:
                    yield seen(method.response, message)
            except grpc.RpcError as error:
                _refuse(context, error)

        return answer


def _request(request, method: Method):
    if method.client_streaming:
        return (seen(method.request, message) for message in request)
    return seen(method.request, request)


def _left(context: grpc.ServicerContext) -> float:
    left = context.time_remaining()
    return _SECONDS if left is None else min(left, _SECONDS)


def _metadata(context: grpc.ServicerContext) -> list[tuple[str, str | bytes]]:
    return [(key, value) for key, value in context.invocation_metadata() if key not in _DROPPED]


def _refuse(context: grpc.ServicerContext, error: grpc.RpcError):
    context.set_trailing_metadata(error.trailing_metadata() or ())
    context.abort(error.code(), error.details())
