"""Groups' rows of the trace: true times and order, though every host's clock says something else."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from fake_broker import FakeBroker, make_group
from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2

from quartet_common.durations import to_duration
from quartet_trainer.fetching import Fetched
from quartet_trainer.records.clocks import Offset
from quartet_trainer.records.group_rows import IN_BATCH, LEASED, PUT, GroupRows
from quartet_trainer.records.trace import Trace

REDIS_AHEAD, ROLLOUT_AHEAD = -7200.0, 5000.0


def stamp(seconds: float) -> Timestamp:
    found = Timestamp()
    found.FromNanoseconds(round(seconds * 1e9))
    return found


class Lives(FakeBroker):
    """Tells the lives it was given, by a clock that is two hours behind; a broker of before tells no clock."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[str, list[tuple[int, float]]] = {}
        self.tells_clock = True
        self.slow = 0.0
        """Seconds that an answer is under way."""

    def GetGroup(self, request, context):
        if request.instance_id not in self.moments:
            context.abort(grpc.StatusCode.NOT_FOUND, "forgotten")
        answer = broker_pb2.GetGroupResponse()
        for kind, at in self.moments[request.instance_id]:
            answer.moments.add(kind=kind, at=stamp(int((at + REDIS_AHEAD) * 1000) / 1000))
        if self.tells_clock:
            answer.answered_at.CopyFrom(stamp(time.time() + REDIS_AHEAD))
        time.sleep(self.slow)
        return answer


@pytest.fixture
def broker() -> Iterator[Lives]:
    broker = Lives()
    yield broker
    broker.close()


def made(name: str, began: float, rollout: str = "one") -> experience_pb2.ExperienceGroup:
    """A group of two completions, generated 0.2 s and 0.4 s after `began` (time.time()) and scored 0.1 s later."""
    group = make_group(name, version=0, completions=2)
    transcript = experience_pb2.GroupTranscript.FromString(group.transcript)
    transcript.rollout_id = rollout
    transcript.started_at.CopyFrom(stamp(began + ROLLOUT_AHEAD))
    transcript.finished_at.CopyFrom(stamp(began + 0.5 + ROLLOUT_AHEAD))
    for number, one in enumerate(transcript.completions, start=1):
        one.generated_after.CopyFrom(to_duration(0.2 * number))
        one.scored_after.CopyFrom(to_duration(0.2 * number + 0.1))
        one.score.elapsed.CopyFrom(to_duration(0.03))
    group.transcript = transcript.SerializeToString()
    return group


def life(began: float) -> list[tuple[int, float]]:
    """Leased once in vain, then leased, put and granted around what `made` says."""
    return [(LEASED, began - 30), (LEASED, began - 0.002), (PUT, began + 0.503), (IN_BATCH, began + 0.9)]


def shown(
    broker: Lives, path: Path, step: int, groups: list[experience_pb2.ExperienceGroup], arrived: float, **manifest: bool
) -> list[dict]:
    """The bars, each with its row, of a batch that was trained in the last second; `arrived`: time.time()."""
    trace, now = Trace(path), time.perf_counter()
    with grpc.insecure_channel(broker.address) as channel:
        rows = GroupRows(trace, broker_pb2_grpc.BrokerServiceStub(channel), "test")
        granted = broker_pb2.BatchManifest(granted=True, **manifest)
        rows.trained(Fetched(step, granted, groups, arrived_at=arrived - time.time() + now), began=now - 1.0, ended=now)
        rows.close()
    trace.close()
    events = [json.loads(line.removesuffix(",")) for line in path.read_text().splitlines()[1:]]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    return [{**event, "row": names[event["tid"]]} for event in events if event["ph"] == "X"]


def bars(events: list[dict], row: str, **about: str | int) -> list[tuple[float, float]]:
    """Beginnings and ends (time.time()) of the bars of a row that are about something, in order."""
    found = [event for event in events if event["row"] == row and about.items() <= event.get("args", {}).items()]
    return sorted((event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in found)


def test_a_groups_bars_are_in_order_and_where_they_were_whatever_the_clocks_say(tmp_path: Path, broker: Lives) -> None:
    base = time.time() - 10
    groups = []
    for number in range(3):
        broker.moments[f"g{number}"] = life(base + number / 10)
        groups.append(made(f"g{number}", base + number / 10))
    now = time.perf_counter()
    events = shown(broker, tmp_path / "trace.json", 4, groups, arrived=base + 1.2)
    assert {event["row"] for event in events} == {
        "rollout one: groups",
        "reward",
        "broker: groups ready",
        "broker: batches",
        "trainer: steps",
    }
    # Redis' clock is known to within a call's time, which is measured here, as everything else to within a millisecond.
    near = 0.01 + (time.perf_counter() - now)
    for number in range(3):
        began = base + number / 10
        ((generating, generated),) = bars(events, "rollout one: groups", group=f"g{number}")
        assert (generating, generated) == pytest.approx((began, began + 0.4), abs=near)
        verified = bars(events, "reward", group=f"g{number}")
        assert [end - start for start, end in verified] == pytest.approx([0.03, 0.03], abs=1e-5)
        assert verified[0][0] >= generating + 0.2 and verified[1][0] >= generated
        ((put, granted),) = bars(events, "broker: groups ready", group=f"g{number}")
        assert verified[1][1] <= put + 2e-6 <= granted + 2e-6 and granted - put == pytest.approx(0.397, abs=near)
        ((delivering, delivered),) = bars(events, "broker: batches", step=4)
        ((trained, _),) = bars(events, "trainer: steps", step=4)
        assert granted - 2e-6 <= delivering <= delivered <= trained + 2e-6
    # Bars that overlap are in threads of their own: Perfetto shows no others rightly.
    for thread in {event["tid"] for event in events}:
        ends = 0
        for event in (event for event in events if event["tid"] == thread):
            assert event["ts"] >= ends - 2
            ends = event["ts"] + event["dur"]


def test_a_group_is_not_shown_granted_after_it_arrived_however_slow_the_broker_answers(
    tmp_path: Path, broker: Lives
) -> None:
    """The middle of question and answer alone would put Redis' moments 0.15 s too late."""
    broker.slow = 0.3
    base = time.time() - 5
    broker.moments["g"] = life(base)
    events = shown(broker, tmp_path / "trace.json", 0, [made("g", base)], arrived=base + 0.902)
    ((put, granted),) = bars(events, "broker: groups ready", group="g")
    ((delivering, delivered),) = bars(events, "broker: batches", step=0)
    assert put <= granted <= delivering + 2e-6 <= delivered + 2e-6
    assert granted - put == pytest.approx(0.397, abs=0.01)


@pytest.mark.parametrize("why", ["an older broker", "a forgotten group", "an older rollout", "a replayed batch"])
def test_what_nobody_tells_is_left_out_and_the_rest_is_there(
    tmp_path: Path, broker: Lives, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = time.time() - 5
    group, manifest = made("g", base), {"replayed": True} if why == "a replayed batch" else {}
    if why != "a forgotten group":
        broker.moments["g"] = life(base)
    if why == "an older rollout":
        group.transcript = make_group("g", version=0).transcript
    broker.tells_clock = why != "an older broker"
    seen = {event["row"] for event in shown(broker, tmp_path / "trace.json", 0, [group], base + 1, **manifest)}
    at_broker = {"broker: groups ready", "broker: batches"} if why == "an older rollout" else set()
    assert seen == {"trainer: steps"} | at_broker
    assert len([line for line in caplog.records if "lacks" in line.message]) == (
        why in ("an older broker", "a forgotten group")
    )


def test_after_a_clock_was_set_only_the_newest_exchanges_count() -> None:
    offset = Offset()
    offset.happened(100.0, 100.0, 100.2)
    offset.happened(200.0, 500.0, 200.4)
    assert offset.seconds == pytest.approx(-299.8)
    offset.happened(300.0, 600.0, 300.1, theirs_later=600.1)
    assert offset.seconds == pytest.approx(-300.0)
