"""Replicas of a service behind one name, as a headless Service of Kubernetes has them, share its calls and streams."""

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from by_hand import ENVIRONMENTS
from started import Started

from quartet_common.ports import free_ports

CALLER = Path(__file__).with_name("replicas.py")
HOSTS = ("127.0.0.1", "127.0.0.2")
NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount")
SECONDS = 120


def may_unshare() -> bool:
    return subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[tuple[int, list[Started]]]:
    """Two reward services at one port of two addresses."""
    (port,) = free_ports(1, neighbor=100)
    reward = ENVIRONMENTS / "reward" / "bin" / "quartet-reward"
    started = []
    try:
        for host in HOSTS:
            command = [reward, "--set", f"addresses.reward={host}:{port}", "--set", "reward.workers=1"]
            started.append(Started(command, tmp_path / f"{host}.log"))
        for each in started:
            each.wait_until(lambda each=each: "serving at" in each.said(), "it serves")
        yield port, started
    finally:
        for each in started:
            each.close()


def ask(tmp_path: Path, port: int, kind: str, count: int) -> int:
    """Call `reward`, a name of both addresses in this caller's /etc/hosts alone; return the number of right answers."""
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"{host} reward\n" for host in HOSTS))
    script = 'mount --bind "$1" /etc/hosts && shift && exec "$@"'
    command = [*NAMESPACE, "sh", "-c", script, "sh", hosts, sys.executable, CALLER, f"reward:{port}", kind, str(count)]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert answer.returncode == 0, answer.stderr
    return int(answer.stdout)


def answered(host: str, port: int, method: str) -> int:
    """Return how many calls a replica has answered, by its metrics."""
    with urllib.request.urlopen(f"http://{host}:{port + 100}/metrics", timeout=20) as answer:
        page = answer.read().decode()
    counts = re.findall(rf'^quartet_grpc_calls_total{{code="OK",method="[^"]*\b{method}"}} (\S+)$', page, re.MULTILINE)
    return round(sum(map(float, counts)))


@pytest.mark.skipif(not may_unshare(), reason="namespaces, for a name of two addresses, are not permitted here")
@pytest.mark.timeout(300)
def test_two_reward_services_behind_one_name_share_calls_and_streams(replicas, tmp_path):
    port, (_, second) = replicas
    assert ask(tmp_path, port, "calls", 100) == 100
    shares = [answered(host, port, "Score") for host in HOSTS]
    assert sum(shares) == 100 and min(shares) >= 40, shares
    assert ask(tmp_path, port, "streams", 40) == 40
    shares = [answered(host, port, "ScoreStream") for host in HOSTS]
    # Which is connected first is chance, as of a rollout: fewer than 8 of 40 for one has a probability of 1e-4.
    assert sum(shares) == 40 and min(shares) >= 8, shares
    second.signal(signal.SIGKILL)
    second.wait(20)
    assert ask(tmp_path, port, "calls", 50) == 50, "those that are left answer all"
