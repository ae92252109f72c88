"""One prompt's trace, over four real service processes and a real collector: from submit to the weights it became.

The same run writes its Gantt trace, which tells the same of the same groups without any collector.
"""

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator

import pytest
from by_hand import ENVIRONMENTS
from trace_collector import Collector, ReceivedSpan

pytestmark = pytest.mark.timeout(300)

# What a trained instance's trace must tell: who says it, and what.
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
    """The traces in which a whole life stands."""
    traces = defaultdict(list)
    for span in spans:
        traces[span.trace].append(span)
    return {name: trace for name, trace in traces.items() if {(span.service, span.name) for span in trace} >= LIFE}


def said_in_logs(services, pythons) -> None:
    """The services' JSON lines, merged by `quartet logs`, carry the ids of what they are about."""
    command = [pythons["client"], "-m", "quartet_client", "logs", str(services.folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {line["service"] for line in lines} == {"broker", "reward", "rollout", "trainer"}
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert all(line["run"] == "by-hand" for line in lines if line["service"] in ("rollout", "trainer"))
    for service, message, ids in (
        ("broker", "run made", {"run"}),
        ("rollout", "weights installed", {"run", "version"}),
        ("trainer", "step done", {"run", "step", "version"}),
    ):
        (line, *_) = [line for line in lines if line["service"] == service and line["message"] == message]
        assert ids <= line.keys(), line


def shown_on_one_clock(services, traces: dict[str, list[ReceivedSpan]]) -> None:
    """trace.json has rows of all services; each group's bars are in order, and where the collector's spans say."""
    services.processes["trainer"].wait(60)
    folder = services.folder / "run"
    events = [json.loads(line.removesuffix(",")) for line in (folder / "trace.json").read_text().splitlines()[1:]]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    (rollout,) = {row for row in rows.values() if row.startswith("rollout ") and row.endswith(": groups")}
    names = {"trainer", "trainer: steps", "weights", "reward", "broker: groups ready", "broker: batches"}
    assert set(rows.values()) == names | {rollout, rollout.removesuffix(": groups")}
    assert (folder / "trace.png").stat().st_size > 0

    def bars(row: str, **about: str | int) -> list[tuple[float, float]]:
        found = [event for event in events if event["ph"] == "X" and rows[event["tid"]] == row]
        times = [
            (each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6)
            for each in found
            if about.items() <= each.get("args", {}).items()
        ]
        return sorted(times)

    for trace in traces.values():
        spans = {span.name: span for span in trace}
        group, step = spans["submit"].attributes["quartet.instance"], spans["optimizer step"].attributes["quartet.step"]
        ((generating, generated),) = bars(rollout, group=group)
        verified = bars("reward", group=group)
        ((put, granted),) = bars("broker: groups ready", group=group)
        ((delivering, arrived),) = bars("broker: batches", step=step)
        ((training, trained),) = bars("trainer: steps", step=step)
        assert len(verified) == 4 and all(generating <= began <= ended <= put + 2e-6 for began, ended in verified)
        # The last completion is verified after it was made; rounding is of microseconds.
        assert generated <= verified[-1][1] + 2e-6
        assert (
            put <= granted
            and granted <= delivering + 2e-6
            and delivering <= arrived <= training + 2e-6 <= trained + 2e-6
        )
        # Here all have one clock, and measured it themselves.
        for shown, name in (((generating, generated), "generate"), ((put, granted), "group ready")):
            assert shown == pytest.approx((spans[name].began / 1e9, spans[name].ended / 1e9), abs=2.0), name


def test_one_trace_follows_a_prompt_from_submit_to_the_weights_that_carry_it(by_hand, pythons, collector):
    services = by_hand(
        **{
            "run.max_steps": 2,
            "run.max_staleness": 0,
            "trainer.evaluation.interval": 0,
            "trainer.checkpoint.interval": 0,
            "trainer.trace": True,
            "trainer.observe_seconds": 0.05,
            "tracing.endpoint": collector.address,
        }
    )
    services.start_redis()
    for name in ("broker", "reward", "rollout", "trainer"):
        services.start(name, "--log-format", "json")
    services.client("run", "--attach", "--plain", *services.arguments)
    services.wait_for("trainer", "training ends")
    traces = whole(collector.wait_for(whole))

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

    # The step is a trace of its own, that links to its groups; its calls are in it.
    spans = collector.wait_for(lambda spans: any(span.name == "train step" for span in spans))
    first = next(span for span in spans if span.name == "train step")
    assert first.attributes["quartet.groups"] == 4 and len(set(first.links)) == 4
    calls = {span.name for span in spans if span.trace == first.trace and span.service == "quartet-broker"}
    assert calls == {"quartet.v1.BrokerService/MarkTrained"}
    said_in_logs(services, pythons)
    shown_on_one_clock(services, traces)
    updates = {span.trace for span in spans if span.name == "publish weights"}
    assert any(span.name == "quartet.v1.RolloutService/FinishWeightUpdate" and span.trace in updates for span in spans)


def test_who_asks_for_traces_without_the_packages_is_told_so(by_hand, pythons, tmp_path):
    services = by_hand(**{"tracing.endpoint": "127.0.0.1:4317"})
    # As in an environment without the extra: Python finds no such package.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['opentelemetry.sdk'] = None\n")
    command = [ENVIRONMENTS / "reward" / "bin" / "quartet-reward", *services.arguments]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "tracing.endpoint" in done.stderr and "quartet-common[tracing]" in done.stderr
