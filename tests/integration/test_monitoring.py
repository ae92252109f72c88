"""A real Prometheus scrapes a real run: the alert rules find their series, and its normal end raises none."""

import json
import re
import shutil
import signal
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from by_hand import ROOT, SERVICES, ByHand
from prometheus_tools import NoPrometheus, prometheus_tool
from started import Started

from quartet_common.ports import free_port

RULES = ROOT / "deploy" / "observability" / "alerts.yaml"
EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]}
# Without TLS, and while no group is invalid and no worker dies.
NOT_THERE = {
    "quartet_certificate_expiry_timestamp_seconds",
    "quartet_trainer_invalid_groups_in_a_row",
    "quartet_reward_workers_ended_total",
}

pytestmark = pytest.mark.timeout(400)


class Prometheus:
    """A server that scrapes each service every second."""

    def __init__(self, folder: Path, addresses: dict[str, str], program: str):
        port = free_port()
        targets = []
        for name in SERVICES:
            host, _, own = addresses[name].partition(":")
            targets.append({"targets": [f"{host}:{int(own) + 100}"], "labels": {"service": name}})
        scrape = {"job_name": "quartet", "scrape_interval": "1s", "scrape_timeout": "1s", "static_configs": targets}
        (folder / "prometheus.yaml").write_text(json.dumps({"scrape_configs": [scrape]}))
        options = [f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/tsdb"]
        command = [program, *options, f"--web.listen-address=127.0.0.1:{port}"]
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"
        self.process = Started(command, folder / "prometheus.log")
        self.process.wait_until(lambda: "Server is ready" in self.process.said(), "it answers", 30)

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """Return the samples of an expression now."""
        with urllib.request.urlopen(self._url + urllib.parse.urlencode({"query": expression}), timeout=20) as answer:
            return json.load(answer)["data"]["result"]

    def until(self, expression: str, holds: Callable[[list[dict[str, Any]]], bool], seconds: float = 120) -> None:
        """Wait until a condition of an expression's samples holds."""
        deadline = time.monotonic() + seconds
        while not holds(found := self.ask(expression)):
            assert time.monotonic() < deadline, f"{expression}: {found}"
            time.sleep(0.2)


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[[ByHand], Prometheus]]:
    """Starts a server for services; skips where there is none."""
    try:
        program = prometheus_tool("prometheus")
    except NoPrometheus as why:
        pytest.skip(str(why))
    started: list[Prometheus] = []

    def start(services: ByHand) -> Prometheus:
        started.append(Prometheus(tmp_path, services.addresses, program))
        return started[-1]

    yield start
    for each in started:
        each.process.close()
    shutil.rmtree(tmp_path / "tsdb", ignore_errors=True)


def test_rules_find_their_series_and_tell_a_crash_of_the_trainer_from_the_end_of_its_run(by_hand, prometheus):
    services = by_hand(run__max_steps=60, trainer__evaluation__interval=30)
    services.start_redis()
    for name in SERVICES:
        services.start(name)
    server = prometheus(services)
    client = services.client("run", "--attach", "--plain", *services.arguments)

    server.until("max by (run) (quartet_trainer_step) >= 3", bool)
    names = {name for text in EXPRESSIONS.values() for name in re.findall(r"\bquartet_[a-z_]+", text)}
    there = 'count by (__name__) ({job="quartet"})'
    server.until(there, lambda found: names - {each["__name__"] for each in metrics(found)} == NOT_THERE)
    for name in ("trainer_phase", "broker_run_active", "rollout_generated_tokens_total"):
        assert {each["metric"].get("run") for each in server.ask(f"quartet_{name}")} == {"by-hand"}, name
    assert not server.ask(EXPRESSIONS["QuartetRunWithoutTrainer"])

    services.stop("trainer", signal.SIGKILL)
    server.until(EXPRESSIONS["QuartetRunWithoutTrainer"], lambda found: metrics(found) == [{"run": "by-hand"}])
    services.start("trainer")
    assert client.wait(200) == 0, services.logs()
    assert services.processes["trainer"].wait(60) == 0, services.logs()
    server.until('up{service="trainer"} == 0', bool)
    server.until("quartet_broker_run_active == 0", bool)
    raised = {alert for alert, text in EXPRESSIONS.items() if server.ask(text)}
    assert raised <= {"QuartetDiskFull"}, "which is this host's affair"


def metrics(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [each["metric"] for each in found]
