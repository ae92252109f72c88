"""The dashboard's picture, verdict and JSON: on events made here, on files, and over HTTP with the real broker."""

import asyncio
import http.client
import json
import re
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from quartet.v1 import broker_pb2
from real_broker import Life, door

from quartet_client import AsyncClient, dashboard
from quartet_client.dashboard import Collector, PageServer, Picture
from quartet_client.dashboard.picture import judge
from quartet_client.dashboard.server import is_loopback
from quartet_client.dashboard.snapshot import snapshot
from quartet_client.errors import InputError
from quartet_client.events import RunEvent
from quartet_client.models import RunStats, ServiceStatus
from quartet_client.progress import MetricsFile

ATTACK = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e"


def _event(number: int, at: float, **what) -> RunEvent:
    message = broker_pb2.RunEvent(event_id=str(number), at=Timestamp(seconds=int(at)), **what)
    return RunEvent.from_proto("demo", message)


def _active(number: int = 1, at: float = 1000) -> RunEvent:
    state = broker_pb2.RunStateChanged(state=broker_pb2.RUN_STATE_ACTIVE)
    return _event(number, at, run_state=state)


def _step(number: int, step: int, at: float, **metrics: float) -> RunEvent:
    told = {"time/step": 2.0, "reward/mean": 0.5} | {name.replace("__", "/"): value for name, value in metrics.items()}
    return _event(number, at, step=broker_pb2.StepFinished(step=step, policy_version=step + 1, metrics=told))


def _picture(*events: RunEvent) -> Picture:
    picture = Picture("demo", folder="runs/demo", opened_at=1000.0)
    for event in events:
        picture.fold(event)
    return picture


def _service(kind: str, health: str = "serving", **fields) -> ServiceStatus:
    return ServiceStatus(kind, "127.0.0.1:1", health, **fields)


def _ended(state: str) -> RunEvent:
    return _event(3, 1011, run_state=broker_pb2.RunStateChanged(state=state, reason="so it was"))


AWAY = "broker at x cannot be reached"
QUICK = _step(2, 0, 1010)
LOADING = _service("rollout", waiting_for=("engine loading",))


@pytest.mark.parametrize(
    ("happened", "now", "level", "word", "words"),
    [
        ([QUICK, _step(3, 1, 1012)], 1013, "healthy", "Healthy", "2 steps done, the last 1.0 s ago; a step takes 2"),
        # Before the first step.
        ([LOADING], 1020, "waiting", "Waiting for the rollout", "rollout waits for engine loading. The run began 20 s"),
        # A service that is away comes before those that wait for it.
        ([LOADING, _service("reward", "unreachable", error="it is")], 1001, "waiting", "Waiting for the reward", ""),
        # No step for long, which is measured by the run's own steps.
        ([QUICK], 1071, "stalled", "Stalled", ""),
        ([QUICK, RunStats(dead=3)], 1011, "attention", "Running, but look", "3 prompts were set aside as dead"),
        # The end is told with its reason, even if the broker has gone.
        ([QUICK, _ended("RUN_STATE_SUCCEEDED"), AWAY], 9000, "finished", "", ""),
        ([QUICK, _ended("RUN_STATE_FAILED"), AWAY], 9000, "failed", "", "so it was"),
        # A broker that is away is no health, after as long as a restart takes.
        ([QUICK, AWAY], 1021, "unknown", "", f"No answer for 10 s: {AWAY}."),
    ],
)
def test_dashboard_verdict_names_the_cause(happened, now, level, word, words):
    picture = _picture(_active())
    for each in happened:
        match each:
            case RunEvent():
                picture.fold(each)
            case ServiceStatus():
                picture.fold_service(each)
            case RunStats():
                picture.stats = each
            case str():
                picture.broker_failed(each)
                picture.broker_away_since = 1011.0
    verdict = judge(picture, now)
    assert verdict.level == level and verdict.word.startswith(word) and words in verdict.sentence, verdict


def test_services_say_how_idle_they_are_and_that_they_were_stopped_after_the_run():
    picture = _picture(_active())
    picture.fold_service(_service("broker", idle_fraction=0.25))
    picture.fold_service(_service("reward", "unreachable", error="reward at 127.0.0.1:1 cannot be reached"))
    broker, reward, *_ = snapshot(picture, 1001)["services"]
    assert broker["idle"] == {"fraction": 0.25, "how": "of the last minute"} and reward["idle"] is None
    assert reward["state"] == "away"
    picture.fold(_ended("RUN_STATE_SUCCEEDED"))
    assert snapshot(picture, 1012)["services"][1]["state"] == "stopped"


def test_events_and_the_file_make_one_curve_and_a_replayed_step_undoes_what_came_after_it():
    picture = _picture()
    rows = [{"kind": "step", "step": step, "time": 100.0 + step, "reward/mean": 0.1} for step in range(4)]
    rows.append({"kind": "evaluation", "set": "held", "policy_version": 5, "eval/held/ans_acc": 0.5})
    picture.fold_rows(False, rows)

    def means() -> list[float]:
        return [row.metrics["reward/mean"] for _, row in picture.rows()]

    for event in (_step(1, 3, 1010, reward__mean=0.3), _step(2, 4, 1012, reward__mean=0.4)):
        picture.fold(event)
    assert means() == [0.1, 0.1, 0.1, 0.3, 0.4]
    picture.fold(_step(3, 2, 1020, reward__mean=0.9))  # a trainer went on from a checkpoint
    assert means() == [0.1, 0.1, 0.9] and not picture.evaluations, "nor is there a set without an evaluation"


def test_accuracies_say_whose_they_are_and_evaluations_have_each_verifiers_reward():
    own = {"reward/math/mean": 0.5, "reward/length/mean": -0.1, "reward/math/ans_acc": 0.4}
    picture = _picture(_step(1, 0, 1010, **own))
    held = {f"eval/held/{name}": value for name, value in {**own, "ans_acc": 0.4, "reward": 0.3}.items()}
    for version in (0, 1):
        finished = broker_pb2.EvaluationFinished(evaluation_set="held", policy_version=version, metrics=held)
        picture.fold(_event(2 + version, 1011 + version, evaluation=finished))
    told = snapshot(picture, 1013)
    assert told["by_whom"] == " by math" and told["verifiers"] == {"math": [[1.0, 0.5]], "length": [[1.0, -0.1]]}
    (shown,) = told["evaluations"]
    assert (shown["by_whom"], shown["reward"]) == (" by math", "0.300 (length -0.100, math 0.500)")
    picture.fold(_event(9, 1014, run_state=broker_pb2.RunStateChanged(state="RUN_STATE_SUCCEEDED")))
    assert "Accuracy by math on held went from 40% to 40%." in snapshot(picture, 1015)["verdict"]["sentence"]


def test_the_metrics_file_is_read_as_it_grows_by_whole_lines_and_again_when_it_was_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert file.read() == (False, []) and not file.problem
    for text, read in (
        ('{"step": 0}\n{"ste', (False, [{"step": 0}])),
        ('{"step": 0}\n{"step": 1}\n', (False, [{"step": 1}])),
        ('{"step": 0}\n{"step": 1}\n', (False, [])),
        # Longer than before, and shorter.
        ('{"step": 0}\n{"step": 8}\n{"step": 9}\n', (True, [{"step": 0}, {"step": 8}, {"step": 9}])),
        ('{"step": 0}\n', (True, [{"step": 0}])),
        ('{"step": 0}\nnonsense\n{"step": 2}\n', (False, [{"step": 2}])),
    ):
        path.write_text(text)
        assert file.read() == read
    assert file.read() == (False, []) and "no JSON" in file.problem, "it stays until the file is written again"
    path.unlink()
    assert file.read() == (True, [])


@asynccontextmanager
async def _page(client: AsyncClient, run_id: str | None, folder=None):
    """Yield a function that fetches from a running dashboard: (status, headers, body)."""
    stop = asyncio.Event()
    collector = Collector(client, run_id, folder)
    with PageServer(lambda: collector.documents) as server:
        collecting = asyncio.create_task(collector.run(stop))

        def fetch(path: str, method: str = "GET", host: str | None = None):
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            try:
                connection.request(method, path, headers={"Host": host} if host else {})
                answer = connection.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()
            finally:
                connection.close()

        async def get(path: str, method: str = "GET", host: str | None = None):
            assert not collecting.done(), collecting
            return await asyncio.to_thread(fetch, path, method, host)

        try:
            yield get
        finally:
            stop.set()
            with suppress(asyncio.CancelledError):
                await asyncio.wait_for(collecting, 20)


async def _until(get, true_of):
    """Poll the state until something is true of it, and return it."""
    told: dict = {}
    try:
        async with asyncio.timeout(60):
            while True:
                told = json.loads((await get("/api/state"))[2])
                if true_of(told):
                    return told
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError(f"in vain for 60 s; the last state: {json.dumps(told)[:3000]}") from None


def _client(addresses, nowhere) -> AsyncClient:
    return AsyncClient(**addresses, trainer=nowhere)


async def test_the_page_and_its_documents_are_served(addresses, nowhere):
    life = Life(addresses["broker"], "demo")
    life.attack(ATTACK)
    async with _client(addresses, nowhere) as client, _page(client, "demo") as get:
        states = ["serving"] * 3 + ["away"]
        await _until(get, lambda told: [each["state"] for each in told["services"]] == states)
        state = await _until(get, lambda told: told["notices"] and told["samples"])
        assert state["verdict"]["level"] == "attention"
        assert "the trainer cannot be reached" in state["verdict"]["sentence"].lower()
        assert state["lines"]["reward"] == [[1.0, 0.25]] and state["run"]["steps_done"] == 1
        told = json.loads((await get("/api/samples"))[2])
        completion = told["groups"][0]["completions"][0]
        assert [each["name"] for each in completion["verifiers"]] == [ATTACK, "length"]
        assert completion["text"] == f"<think>{ATTACK}</think>{ATTACK}" and completion["version_spans"][0] == [3, 0, 2]
        for name in ("", "app.js", "charts.js", "parts.js", "samples.js", "style.css", "icon.svg"):
            status, headers, body = await get(f"/{name}")
            assert status == 200 and body, name
            assert "script-src 'self'" in headers["Content-Security-Policy"]
            assert "unsafe" not in headers["Content-Security-Policy"]
            assert "require-trusted-types-for 'script'; trusted-types 'none'" in headers["Content-Security-Policy"]
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert b"http://" not in body.replace(b"http://www.w3.org/2000/svg", b"") and b"https://" not in body


async def test_what_is_not_the_page_is_refused(addresses, nowhere):
    async with _client(addresses, nowhere) as client, _page(client, "demo") as get:
        for path in ("/../server.py", "/%2e%2e/server.py", "/api/", "/api/secrets", "/page/app.js", "/etc/passwd"):
            status, headers, _ = await get(path)
            assert status == 404 and "Content-Security-Policy" in headers, path
        assert (await get("/api/state", "POST"))[0] == 501
        for host in ("evil.example", "evil.example:7180", "127.0.0.1.evil.example", "192.168.0.1:7180"):
            assert (await get("/api/state", host=host))[0] == 421, host
        for host in ("localhost", "localhost:9999", "127.0.0.1:1", "[::1]:7180"):
            assert (await get("/api/state", host=host))[0] == 200, host


def test_other_machines_reach_it_only_if_told_so():
    for host in ("0.0.0.0", "192.168.0.1", "::", "example.org"):
        assert not is_loopback(host)
        with pytest.raises(InputError, match="--allow-remote"):
            PageServer(dict, host)
    with PageServer(dict, "0.0.0.0", allow_remote=True) as server:
        taken = f"--port: 127.0.0.1:{server.port} cannot be listened on"
        with pytest.raises(InputError, match=taken):
            PageServer(dict, "127.0.0.1", server.port)
    for host in ("::1%nonsense", "192.0.2.1", "x" * 70):  # no address, another machine's, no name
        with pytest.raises(InputError, match=f"--host: {host}:0 cannot be listened on"):
            PageServer(dict, host, allow_remote=True)


async def test_the_newest_active_run_is_shown_if_none_is_named(addresses, nowhere):
    async with _client(addresses, nowhere) as client, _page(client, None) as get:
        state = await _until(get, lambda told: told["services"][0]["state"] == "serving")
        assert state["verdict"]["word"] == "Waiting for a run" and state["run"]["id"] == ""
        await client.create_run("late")
        state = await _until(get, lambda told: told["run"]["state"] == "active")
        assert state["run"]["id"] == "late"


async def test_a_run_that_is_over_is_shown_from_its_file_without_a_broker(nowhere, tmp_path):
    rows = [
        {"kind": "step", "step": step, "policy_version": step + 1, "time": 1000.0 + step, "reward/mean": step / 10}
        for step in range(5)
    ]
    rows.append(
        {"kind": "evaluation", "set": "held", "step": 5, "policy_version": 5, "time": 1.0, "eval/held/ans_acc": 0.5}
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    everywhere = dict.fromkeys(("broker", "reward", "rollout", "trainer"), nowhere)
    async with AsyncClient(**everywhere) as client, _page(client, "over", tmp_path) as get:
        state = await _until(get, lambda told: told["lines"]["reward"] and told["verdict"]["word"] == "A recorded run")
        assert len(state["lines"]["reward"]) == 5
        assert [(each["set"], each["points"]) for each in state["evaluations"]] == [("held", [[5.0, 0.5]])]
        assert "5 steps" in state["verdict"]["sentence"] and "?." not in state["verdict"]["sentence"]
        assert (state["run"]["began"], state["run"]["ended"]) == (1000.0, 1004.0)


def test_no_script_of_the_page_makes_markup_or_code_of_a_string():
    """What a model or a service wrote is text there; the policy's trusted types would refuse all else."""
    scripts = list((Path(dashboard.__file__).parent / "page").glob("*.js"))
    made = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|\beval\(|new Function")
    assert len(scripts) == 4 and not [path.name for path in scripts if made.search(path.read_text())]


def test_the_command_follows_a_broker_that_comes_back_and_ends_by_a_signal(address, nowhere):
    command = [sys.executable, "-m", "quartet_client", "dashboard", "--port", "0", "--no-open"]
    process = subprocess.Popen([*command, "--broker", nowhere, "--run", "demo"], stdout=subprocess.PIPE, text=True)
    page = process.stdout.readline().split()[-1]

    def until(true_of) -> dict:
        deadline, told = time.monotonic() + 60, {}
        while not true_of(told):
            assert time.monotonic() < deadline, json.dumps(told)[:3000]
            with urlopen(f"{page}api/state", timeout=10) as answer:
                told = json.load(answer)
            time.sleep(0.1)
        return told

    life = Life(address, "demo")
    for step in range(2):  # a broker comes, with a step more, and goes
        until(lambda told: told and told["verdict"]["word"] == "Broker away")
        life.report(step=broker_pb2.StepFinished(step=step, policy_version=step + 1, metrics={"reward/mean": 0.5}))
        with door(nowhere, address):
            state = until(lambda told, wanted=step + 1: told and told["run"]["steps_done"] == wanted)
            assert not state["broker_away"]
    process.terminate()
    assert process.wait(timeout=30) == 0
