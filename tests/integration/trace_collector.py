"""An OpenTelemetry collector: a gRPC server on a real socket that keeps the spans it is sent."""

from concurrent import futures
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came over the wire; ids in hex, times in nanoseconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    attributes: dict[str, object]
    links: tuple[str, ...] = field(default=())
    """Traces it links to."""


def _value(value) -> object:
    return getattr(value, value.WhichOneof("value"))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Start it, and give `address` to services as tracing.endpoint."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request, context):  # noqa: N802 (OpenTelemetry's name)
        for resource in request.resource_spans:
            about = {pair.key: _value(pair.value) for pair in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_span(str(about["service.name"]), span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(grace=None).wait(10)


def _span(service: str, span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        began=span.start_time_unix_nano,
        ended=span.end_time_unix_nano,
        attributes={pair.key: _value(pair.value) for pair in span.attributes},
        links=tuple(link.trace_id.hex() for link in span.links),
    )
