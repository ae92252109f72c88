"""Ports that are given to servers of the tests, and to those of a launcher."""

import socket
import subprocess
import sys

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


def test_a_port_is_reserved_in_all_processes_until_its_process_ends():
    """Also while nothing listens on it, which is when launchers that are started at once choose."""
    first = ports.free_port()
    program = "import sys; from quartet_common import ports; print(ports.reserve_ports([%d])); sys.stdin.read()"

    def reserved(port: int) -> str:
        return subprocess.run([sys.executable, "-c", program % port], input="", text=True, capture_output=True).stdout

    assert reserved(first) == "False\n"
    port = ports._LOWEST - 1  # which free_ports returns to nobody
    with subprocess.Popen([sys.executable, "-c", program % port], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "True\n"
        assert not ports.reserve_ports([port]) and not ports.reserve_ports([port - 1, port])
        assert reserved(port - 1) == "True\n", "of several, either all are reserved or none"
        other.stdin.close()
        other.wait(30)
    assert reserved(port) == "True\n"
