"""An OpenTelemetry collector: a gRPC server that stores the received spans."""

from concurrent import futures
from dataclasses import dataclass

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """A received span; ids in hex, time in nanoseconds."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    began: int
    attributes: dict[str, object]
    links: tuple[str, ...]
    """Linked traces."""


def _values(pairs) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Start it; `address` is for tracing.endpoint of services."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def Export(self, request, context):  # noqa: N802 (OpenTelemetry's name)
        for resource in request.resource_spans:
            service = str(_values(resource.resource.attributes)["service.name"])
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                links = tuple(link.trace_id.hex() for link in span.links)
                attributes = _values(span.attributes)
                one = ReceivedSpan(service, span.name, *ids, span.start_time_unix_nano, attributes, links)
                self.spans.append(one)
        return trace_service_pb2.ExportTraceServiceResponse()

    def close(self) -> None:
        self._server.stop(grace=None).wait(10)
