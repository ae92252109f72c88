"""Ports that are given to servers of the tests, and to those of a launcher."""

import socket

import pytest

from quartet_common import ports


def test_ports_are_free_different_and_not_the_kernels():
    found = ports.free_ports(50)
    lowest = int(ports._GIVEN_BY_KERNEL.read_text().split()[0])
    assert len(set(found)) == 50 and all(10_000 <= port < lowest for port in found)
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert not set(ports.free_ports(50)) & set(found)


def test_one_that_is_taken_is_not_given(monkeypatch):
    port = ports.free_port()
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports, "_LOWEST", port)
    monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda self, among, count: [port, port + 1])
    with socket.create_server(("127.0.0.1", port)):
        assert ports.free_port() == port + 1
        with pytest.raises(OSError, match="only 0 of 1 ports between"):
            ports.free_port()


def test_a_neighbour_is_free_too_and_neither_is_reserved(monkeypatch):
    port = ports.free_port()
    monkeypatch.setattr(ports, "_given", set())
    monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda self, among, count: [port, port + 1, port + 2])
    with socket.create_server(("127.0.0.1", port + 100)):
        assert ports.free_ports(1, neighbour=100, reserved={port + 101}) == [port + 2]
