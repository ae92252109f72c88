"""The metrics port: who is answered, and what those who are not cost."""

import http.client
import socket
import threading
from http import HTTPStatus

import pytest

from quartet_common.ports import free_port
from quartet_server import metrics


@pytest.fixture(scope="module")
def port() -> int:
    chosen = free_port()
    metrics.serve_metrics("127.0.0.1", chosen, ["gpu7.example"])
    return chosen


def scrape(port: int, host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/metrics", headers={"Host": host})
    answer = connection.getresponse()
    try:
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    "host",
    [
        *("localhost:7201", "LOCALHOST", "10.0.0.7:7201", "[::1]:7201", "broker:7201", "gpu7.example"),
        *("GPU7.example.:1", ""),
    ],
)
def test_whoever_asks_by_address_a_local_name_or_one_of_the_run_file_is_answered(port, host):
    status, page = scrape(port, host)
    assert status == HTTPStatus.OK and b"# HELP" in page


@pytest.mark.parametrize("host", ["evil.example:7201", "127.0.0.1.evil.example", "gpu7.example.evil.org"])
def test_a_page_elsewhere_whose_name_points_here_is_not(port, host):
    status, page = scrape(port, host)
    assert status == HTTPStatus.MISDIRECTED_REQUEST
    assert b"server.metrics_hosts" in page and b"# HELP" not in page


def test_connections_are_bounded_and_the_oldest_gives_way(port):
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(200)]
    try:
        assert scrape(port)[0] == HTTPStatus.OK
        assert all(each.recv(1) == b"" for each in idle[:184]), "the oldest were hung up on"
        assert threading.active_count() - before <= 20
    finally:
        for each in idle:
            each.close()


def test_a_silent_client_is_hung_up_on(monkeypatch, port):
    monkeypatch.setattr(metrics._Handler, "timeout", 0.01)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as silent:
        silent.sendall(b"GET /metrics HTTP/1.1\r\nHost: loc")
        assert silent.recv(1) == b""
