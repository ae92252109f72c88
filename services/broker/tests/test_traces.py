"""The broker's spans, in OpenTelemetry's in-memory exporter; at Redis the broker has the documented rights only."""

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from world import group

from quartet_common import tracing

# The example of https://www.w3.org/TR/trace-context/
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch):
    """Spans that ended, by name."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_active", tracing._Active(provider.get_tracer("test"), provider))

    def _spans(name: str) -> list:
        return [span for span in exporter.get_finished_spans() if span.name == name]

    return _spans


async def test_a_groups_waits_and_its_put_are_told_within_its_trace(world, spans):
    await world.create(groups_per_step=1)
    await world.submit("a", traceparent=TRACEPARENT)
    (lease,) = await world.lease()
    assert lease.instance.traceparent == TRACEPARENT
    put = group(lease)
    put.group.header.traceparent = TRACEPARENT
    assert await world.put(put) == ["ACCEPTED"]
    await world.open()
    _, (stored,) = await world.take(0)
    assert stored.header.traceparent == TRACEPARENT, "the trainer goes on with it"
    for name in ("prompt queued", "store group", "group ready"):
        (span,) = spans(name)
        assert f"{span.context.trace_id:032x}" == TRACEPARENT.split("-")[1]
        assert f"{span.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
        assert span.start_time <= span.end_time
        assert span.attributes["quartet.instance"] == "a" and span.attributes["quartet.run"] == world.run_id
    assert not spans("submit"), "the trace has begun already"
    # A batch that is asked for again waited no second time.
    await world.take(0)
    assert len(spans("group ready")) == 1


async def test_the_broker_begins_the_trace_of_who_does_not(world, spans):
    await world.create()
    await world.submit("a", "b")
    first, second = (lease.instance.traceparent for lease in await world.lease())
    assert tracing.is_valid(first) and first.split("-")[1] != second.split("-")[1], "each its own"
    roots = {f"{span.context.trace_id:032x}" for span in spans("submit") if span.parent is None}
    assert roots == {first.split("-")[1], second.split("-")[1]}
    for traceparent in ("", TRACEPARENT):
        assert (await world.submit("a", traceparent=traceparent)).duplicates == 1, "it is no part of the content"


async def test_what_is_no_trace_context_is_refused(world):
    await world.create()
    with pytest.raises(Exception, match="traceparent: got .*W3C"):
        await world.submit("a", traceparent=TRACEPARENT.replace("0af7", "0AF7"))
