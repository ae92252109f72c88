"""The network of a chaos run: all processes on loopback, or each on its own host, so that links can be cut.

The hosts are network namespaces (tests/hosts/lan.py), which vanish when the run's last process exits.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from quartet_common.ports import free_ports

sys.path.append(str(Path(__file__).resolve().parents[1] / "hosts"))
from lan import Lan  # noqa: E402 (beside the other suite's tests)

BROKERS = ("broker-a", "broker-b")
REWARDS = ("reward-a", "reward-b")
ROLLOUTS = ("rollout-a", "rollout-b")
TRAINERS = ("trainer-a", "trainer-b")
SERVERS = ("redis", *BROKERS, *REWARDS)
EVERYONE = (*SERVERS, *ROLLOUTS, *TRAINERS, "feeder")


class Loopback:
    """All processes on 127.0.0.1; links cannot be cut."""

    def __init__(self) -> None:
        self._ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self._ports[name]}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` on the host of the process `name`."""
        return list(command)


class Hosts:
    """A host for each process. Create it only `lan.within` the namespaces."""

    def __init__(self) -> None:
        self._hosts = {name: f"10.79.0.{number}" for number, name in enumerate(EVERYONE, start=1)}
        self._lan = Lan(self._hosts)
        self._cuts: Counter[tuple[str, str]] = Counter()  # cuts in effect by pair of hosts

    def address(self, name: str) -> str:
        return f"{self._hosts[name]}:{7101 + EVERYONE.index(name)}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        return self._lan.command(name, command)

    def cut(self, one: Sequence[str], other: Sequence[str]) -> None:
        """Block traffic from one side to the other, and so replies."""
        for pair in product(one, other):
            if not self._cuts[pair]:
                self._lan.part(*pair)
            self._cuts[pair] += 1

    def heal(self, one: Sequence[str], other: Sequence[str]) -> None:
        """Undo a cut; pairs that another cut contains stay blocked."""
        for pair in product(one, other):
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                self._lan.join(*pair)
