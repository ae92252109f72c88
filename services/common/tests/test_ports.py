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


def test_there_are_ports_where_the_kernel_may_use_all(tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "_GIVEN_BY_KERNEL", tmp_path / "ip_local_port_range")
    ports._GIVEN_BY_KERNEL.write_text("1024\t65535\n")
    assert len(set(ports.free_ports(5, neighbor=100))) == 5
