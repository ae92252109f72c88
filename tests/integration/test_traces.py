"""A prompt's trace over four real services and a real collector, from submission to the weight update."""

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from by_hand import ENVIRONMENTS
from trace_collector import Collector, ReceivedSpan

pytestmark = pytest.mark.timeout(300)

# The spans, by service, of a trained instance's trace.
LIFE = {
    ("quartet-client", "submit"),
    ("quartet-broker", "prompt queued"),
    ("quartet-rollout", "rollout"),
    ("quartet-rollout", "generate"),
    ("quartet-reward", "verify"),
    ("quartet-rollout", "put"),
    ("quartet-broker", "store group"),
    ("quartet-broker", "group ready"),
    ("quartet-trainer", "optimizer step"),
    ("quartet-trainer", "weights published"),
}


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def whole(spans: list[ReceivedSpan]) -> dict[str, list[ReceivedSpan]]:
    """Return the traces that have all these spans."""
    traces = defaultdict(list)
    for span in spans:
        traces[span.trace].append(span)
    return {name: trace for name, trace in traces.items() if {(span.service, span.name) for span in trace} >= LIFE}


def calls(service: str, name: str, spans: list[ReceivedSpan]) -> set[str]:
    """Return the RPCs of a service in the traces of spans of this name."""
    traces = {span.trace for span in spans if span.name == name}
    return {span.name for span in spans if span.trace in traces and span.service == service}


def in_the_file_too(path: Path, traces: dict[str, list[ReceivedSpan]]) -> None:
    """All services append their spans to one file in Chrome's trace format, with the same ids."""
    events = json.loads(path.read_text().rstrip().removesuffix(",") + "]")
    processes = {each["pid"]: each["args"]["name"].split()[0] for each in events if each["ph"] == "M"}
    begun = {each["id"]: each for each in events if each["ph"] == "b"}
    assert {each["id"] for each in events if each["ph"] == "e"} == begun.keys()
    for span in (span for trace in traces.values() for span in trace):
        event = begun[span.id]
        assert (f"quartet-{processes[event['pid']]}", event["name"]) == (span.service, span.name)
        assert event["args"]["trace"] == span.trace and event["ts"] == pytest.approx(span.began / 1000)


def test_one_trace_follows_a_prompt_from_submit_to_the_weights_that_carry_it(by_hand, pythons, collector, tmp_path):
    services = by_hand(
        **{
            "run.max_steps": 2,
            "run.max_staleness": 0,
            "trainer.evaluation.interval": 0,
            "trainer.checkpoint.interval": 0,
            "tracing.endpoint": collector.address,
            "tracing.file": f"{tmp_path}/spans.json",
        }
    )
    services.start_redis()
    for name in ("broker", "reward", "rollout", "trainer"):
        services.start(name, "--log-format", "json")
    assert services.client("run", "--attach", "--plain", *services.arguments).wait(200) == 0, services.logs()
    assert services.processes["trainer"].wait(120) == 0, services.logs()
    for name in ("rollout", "reward", "broker"):  # an exiting service flushes its spans
        assert services.stop(name) == 0, services.log(name)
    spans = collector.spans
    traces = whole(spans)
    assert traces, sorted({(span.service, span.name) for span in spans})
    for trace in traces.values():
        ids = {span.id for span in trace}
        roots = [span for span in trace if not span.parent]
        assert [(span.service, span.name) for span in roots] == [("quartet-client", "submit")]
        assert all(span.parent in ids for span in trace if span.parent), "every span hangs on another of the trace"
        instance = roots[0].attributes["quartet.instance"]
        said = {span.attributes["quartet.instance"] for span in trace if "quartet.instance" in span.attributes}
        assert said == {instance}
        one = {span.name: span for span in trace}
        order = [one[name] for name in ("submit", "rollout", "optimizer step", "weights published")]
        assert sorted(order, key=lambda span: span.began) == order
        assert one["generate"].attributes["quartet.completions"] == 4
        assert sum(span.name == "verify" for span in trace) == 4
        assert one["store group"].attributes["quartet.outcome"] == "accepted"
        step = one["optimizer step"].attributes["quartet.step"]
        assert one["group ready"].attributes["quartet.step"] == step
        assert one["generate"].attributes["quartet.policy_version.oldest"] <= step
        assert one["weights published"].attributes["quartet.policy_version"] >= step + 1
        assert one["weights published"].attributes["quartet.rollouts"] == 1

    # The step has its own trace, with links to its groups and with its calls.
    first = next(span for span in spans if span.name == "train step")
    assert first.attributes["quartet.groups"] == 4 and len(set(first.links)) == 4
    assert calls("quartet-broker", "train step", spans) == {"quartet.v1.BrokerService/MarkTrained"}
    updates = calls("quartet-rollout", "publish weights", spans)
    assert "quartet.v1.RolloutService/FinishWeightUpdate" in updates
    in_the_file_too(tmp_path / "spans.json", traces)


def test_who_asks_for_traces_without_the_packages_is_told_so(by_hand, pythons, tmp_path):
    services = by_hand(**{"tracing.endpoint": "127.0.0.1:4317"})
    # As in an environment without the extra.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry.sdk'] = None\n")
    command = [ENVIRONMENTS / "reward" / "bin" / "quartet-reward", *services.arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "tracing.endpoint" in done.stderr and "quartet env add reward opentelemetry-sdk" in done.stderr
