"""Hosts on one network: a network namespace for each, connected by a bridge, with links that can be cut or slowed.

Each command on a host also has the host's name and, as on Debian, an /etc/hosts that maps this name to 127.0.1.1.

`within` puts all of it into new network, mount and process namespaces: it cannot reach the machine's own network, and
the kernel removes it, with all processes, when the harness exits. The harness is on the bridge too, at OPERATOR.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

OPERATOR = "10.79.0.254"
INTERFACE = "lan0"  # of every host

_TOOLS = {"unshare": "util-linux", "nsenter": "util-linux", "mount": "mount", "ip": "iproute2", "tc": "iproute2"}
_NAMESPACES = "/run/netns"
_NAMED = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
_SECONDS = 20.0


class Lan:
    """The bridge and its hosts. Create it only `within` the namespaces."""

    def __init__(self, hosts: Mapping[str, str]) -> None:
        """`hosts`: addresses by name, of 10.79.0.0/24."""
        self._hosts = hosts
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "switch", "type", "bridge")
        _run("ip", "address", "add", f"{OPERATOR}/24", "dev", "switch")
        _run("ip", "link", "set", "switch", "up")
        for name, address in hosts.items():
            _run("ip", "netns", "add", name)
            _run("ip", "link", "add", name, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "link", "set", name, "master", "switch", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _names(name).write_text(f"127.0.0.1\tlocalhost\n127.0.1.1\t{name}\n\n::1\tlocalhost ip6-localhost\n")

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs on a host, in the same process: each executes the next."""
        own = ["unshare", "--uts", "--mount", "sh", "-c", _NAMED, host, str(_names(host))]
        return ["nsenter", f"--net={_NAMESPACES}/{host}", *own, *command]

    def cut(self, host: str) -> None:
        """Drop all packets from and to a host."""
        _run("ip", "link", "set", host, "nomaster")

    def heal(self, host: str) -> None:
        _run("ip", "link", "set", host, "master", "switch")

    def part(self, host: str, other: str) -> None:
        """Block traffic from `host` to `other`: `host` gets errors, `other` gets no replies."""
        _run("ip", "-n", host, "route", "add", "unreachable", f"{self._hosts[other]}/32")

    def join(self, host: str, other: str) -> None:
        """Undo `part`."""
        _run("ip", "-n", host, "route", "del", "unreachable", f"{self._hosts[other]}/32")

    def slow(self, host: str, kbit: int) -> None:
        """Limit a host's link to `kbit` kbit/s in each direction."""
        shape = ("root", "tbf", "rate", f"{kbit}kbit", "burst", "16kb", "latency", "300ms")
        _run("tc", "qdisc", "replace", "dev", host, *shape)
        _run("tc", "-n", host, "qdisc", "replace", "dev", INTERFACE, *shape)

    def quick(self, host: str) -> None:
        _run("tc", "qdisc", "del", "dev", host, "root")
        _run("tc", "-n", host, "qdisc", "del", "dev", INTERFACE, "root")


def _names(host: str) -> Path:
    return Path(f"/run/hosts.{host}")


def why_not() -> str:
    """Return why such a network is not possible here and what to do; empty if it is possible."""
    for tool, package in _TOOLS.items():
        if shutil.which(tool) is None:
            return f"there is no '{tool}': apt-get install {package}"
    probe = (
        "ip netns add one && ip link add switch type bridge && ip link add v0 type veth peer name v1 netns one && "
        "ip link set v0 master switch && tc qdisc add dev v0 root tbf rate 1mbit burst 16kb latency 300ms && "
        f"nsenter --net={_NAMESPACES}/one true"
    )
    done = subprocess.run(within(["sh", "-c", probe]), capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode == 0:
        return ""
    words = done.stderr.strip().splitlines()
    return f"network namespaces, bridges or shaping are not permitted here: {words[-1] if words else done.returncode}"


def within(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` in namespaces in which a Lan can be created."""
    # A private /run, in which `ip netns` keeps the names of namespaces.
    begin = f'mount -t tmpfs none /run && mkdir {_NAMESPACES} && exec "$@"'
    rootless = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    if rootless:  # preloaded interpreters are outside of the user namespace and could not enter these networks
        begin = f"unset QUARTET_PRELOADED; {begin}"
    spaces = ["--net", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *rootless, *spaces, "sh", "-c", begin, "sh", *command]


def _run(*command: str) -> None:
    done = subprocess.run(command, timeout=_SECONDS, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
