"""Ports that are given to servers of the tests, and to those of a launcher."""

import socket

from quartet_common import ports


def test_ports_are_free_different_and_not_the_kernels():
    found = ports.free_ports(50)
    lowest = int(ports._GIVEN_BY_KERNEL.read_text().split()[0])
    assert len(set(found)) == 50 and all(10_000 <= port < lowest for port in found)
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert not set(ports.free_ports(50)) & set(found)
