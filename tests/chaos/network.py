"""Where the processes are: all on loopback, or each in a network namespace of its own, with links where two talk.

A cut takes links down, at one end: that end is told so ("network is unreachable"), the other sees silence, as with a
switch that fails in between. Nothing leaves the namespaces; they are made inside a network and a mount namespace of the
harness itself (`unshare`), so all of it is gone when the last process of the run ends, however that ends.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from typing import Protocol

from quartet_common.ports import free_ports

BROKERS = ("broker-a", "broker-b")
REWARDS = ("reward-a", "reward-b")
ROLLOUTS = ("rollout-a", "rollout-b")
TRAINERS = ("trainer-a", "trainer-b")
SERVERS = ("redis", *BROKERS, *REWARDS)
EVERYONE = (*SERVERS, *ROLLOUTS, *TRAINERS, "feeder")

LINKS = (
    *(("redis", broker) for broker in BROKERS),
    *((broker, caller) for broker in BROKERS for caller in (*ROLLOUTS, *TRAINERS, "feeder")),
    *((reward, rollout) for reward in REWARDS for rollout in ROLLOUTS),
)

_NAMESPACES = "/run/netns"
_INSIDE = "QUARTET_CHAOS_NAMESPACE"
_SECONDS = 20.0


class Place(Protocol):
    """Where processes run, and where they find each other."""

    def address(self, name: str) -> str:
        """Return host:port of a server."""
        ...

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` in the place of the process `name`."""
        ...

    def cut(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Take down every link between two sides."""
        ...

    def heal(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Bring those links up again."""
        ...


class Loopback:
    """All on 127.0.0.1; nothing can be cut."""

    def __init__(self) -> None:
        self._ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))

    def address(self, name: str) -> str:
        """Return host:port of a server."""
        return f"127.0.0.1:{self._ports[name]}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line as it is."""
        return list(command)

    def cut(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Raise ValueError: there are no links."""
        raise ValueError("a network fault needs namespaces: run the network form")

    heal = cut


class Namespaces:
    """A namespace for each process. To be made `inside` only."""

    def __init__(self) -> None:
        self._hosts = {name: f"10.77.0.{number}" for number, name in enumerate(EVERYONE, start=1)}
        self._links = {frozenset(pair): number for number, pair in enumerate(LINKS)}
        self._down: dict[frozenset[str], int] = {}  # how many cuts keep a link down
        for name, host in self._hosts.items():
            _ip("netns", "add", name)
            _ip("-n", name, "address", "add", f"{host}/32", "dev", "lo")
            _ip("-n", name, "link", "set", "lo", "up")
        for number, (one, other) in enumerate(LINKS):
            ends = (f"v{number}a", "netns", one, "type", "veth", "peer", "name", f"v{number}b", "netns", other)
            _ip("link", "add", *ends)
            self._up(one, f"v{number}a", other)
            self._up(other, f"v{number}b", one)

    def address(self, name: str) -> str:
        """Return host:port of a server."""
        return f"{self._hosts[name]}:{7101 + EVERYONE.index(name)}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs in the namespace; it becomes the command, it does not stay its parent."""
        return ["nsenter", f"--net={_NAMESPACES}/{name}", *command]

    def cut(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Take down every link between two sides, at the first side's end."""
        for pair in self._between(one, other):
            self._down[frozenset(pair)] = self._down.get(frozenset(pair), 0) + 1
            _ip("-n", pair[0], "link", "set", self._end(*pair), "down")

    def heal(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Bring up what no other cut keeps down."""
        for pair in self._between(one, other):
            self._down[frozenset(pair)] -= 1
            if not self._down[frozenset(pair)]:
                self._up(pair[0], self._end(*pair), pair[1])
                self._up(pair[1], self._end(*reversed(pair)), pair[0])

    def _between(self, one: Iterable[str], other: Iterable[str]) -> list[tuple[str, str]]:
        theirs = list(other)
        return [(here, there) for here in one for there in theirs if frozenset((here, there)) in self._links]

    def _end(self, here: str, there: str) -> str:
        number = self._links[frozenset((here, there))]
        return f"v{number}{'a' if LINKS[number][0] == here else 'b'}"

    def _up(self, here: str, device: str, there: str) -> None:
        _ip("-n", here, "link", "set", device, "up")
        route = (f"{self._hosts[there]}/32", "dev", device, "src", self._hosts[here])
        _ip("-n", here, "route", "replace", *route)


def inside() -> bool:
    """Tell whether this process is in namespaces of its own."""
    return os.environ.get(_INSIDE) == "1"


def why_not() -> str:
    """Return why namespaces cannot be made here; empty if they can."""
    for tool in ("unshare", "nsenter", "ip"):
        if shutil.which(tool) is None:
            return f"there is no '{tool}' (util-linux and iproute2 are needed)"
    probe = (
        "ip netns add one && ip netns add two && ip link add v0 netns one type veth peer name v1 netns two && "
        f"nsenter --net={_NAMESPACES}/one true"
    )
    done = subprocess.run(within(["sh", "-c", probe]), capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode == 0:
        return ""
    words = done.stderr.strip().splitlines()
    return f"namespaces cannot be made: {words[-1] if words else f'status {done.returncode}'}"


def within(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` in a network and a mount namespace of its own, `inside`."""
    # /run is private there: the names of namespaces stand in it, and vanish with it.
    begin = f'mount -t tmpfs none /run && mkdir {_NAMESPACES} && {_INSIDE}=1 exec "$@"'
    rootless = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *rootless, "--net", "--mount", "--propagation", "private", "sh", "-c", begin, "sh", *command]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=_SECONDS, capture_output=True, text=True)
