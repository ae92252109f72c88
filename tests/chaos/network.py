"""Where the processes are: all on loopback, or each on a host of its own, so that some can be cut off from others.

Nothing leaves the namespaces of those hosts (tests/hosts/lan.py); they are gone when the last process of the run ends.
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
    """All on 127.0.0.1; nothing can be cut."""

    def __init__(self) -> None:
        self._ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self._ports[name]}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` in the place of the process `name`."""
        return list(command)


class Hosts:
    """A host for each process. To be made `lan.within` only."""

    def __init__(self) -> None:
        self._hosts = {name: f"10.79.0.{number}" for number, name in enumerate(EVERYONE, start=1)}
        self._lan = Lan(self._hosts)
        self._cuts: Counter[tuple[str, str]] = Counter()  # how many keep a host from another

    def address(self, name: str) -> str:
        return f"{self._hosts[name]}:{7101 + EVERYONE.index(name)}"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        return self._lan.command(name, command)

    def cut(self, one: Sequence[str], other: Sequence[str]) -> None:
        """Let nothing through from one side to the other, which is told so; the other is not answered any more."""
        for pair in product(one, other):
            if not self._cuts[pair]:
                self._lan.part(*pair)
            self._cuts[pair] += 1

    def heal(self, one: Sequence[str], other: Sequence[str]) -> None:
        """Let through again what no other cut stops."""
        for pair in product(one, other):
            self._cuts[pair] -= 1
            if not self._cuts[pair]:
                self._lan.join(*pair)
