"""The schedule of faults, drawn from a seed before the run starts.

A fault is due at a number of committed groups, not at a time, so that the system makes progress between faults.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Durations of stops and cuts, in seconds. They exceed the ttls of leases and members; those of Redis exceed the timeout
# of the brokers for it.
PAUSE_SECONDS = (2.6, 3.6)
REDIS_PAUSE_SECONDS = (1.5, 2.4)
CUT_SECONDS = (2.6, 4.0)

POINTS = ("leased", "trained", "marked", "checkpoint-half", "checkpoint-written", "checkpoint-durable", "committed")
"""Points at which the trainer is killed, named for its last action (standin_trainer)."""


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        at: committed groups at which it is due.
        kind: "kill", "terminate", "pause", "trap", "cut", "snapshot", "restore".
        target: a process ("broker-a"); "leader", the active trainer; "redis"; several, as "broker-a broker-b"; for a
            cut, the two sides ("rollout-a | broker-a broker-b"). A trap's target is the point; a restore's may be
            "redis settling", after which the next trainer that settles its ledger is killed.
        seconds: duration of a pause or a cut.
        pick: which snapshot is restored, from 0.0, the oldest, to 1.0, the newest.
    """

    at: int
    kind: str
    target: str
    seconds: float = 0.0
    pick: float = 1.0

    def __str__(self) -> str:
        which = f" from {self.pick:.0%} of the snapshots" if self.kind == "restore" else ""
        return f"{self.kind} {self.target}{which}" + (f" for {self.seconds:.1f} s" if self.seconds else "")


# A deck of twenty faults. Targets in braces are drawn.
PROCESS_DECK: tuple[tuple[str, str], ...] = (
    *(("kill", target) for target in ("{broker}", "broker-a broker-b", "{reward}", "{rollout}", "leader", "feeder")),
    *(("kill", target) for target in ("redis", "redis", "{everything}")),
    *(("terminate", target) for target in ("{rollout}", "{broker}")),
    *(("pause", target) for target in ("{broker}", "{reward}", "{rollout}", "leader", "redis")),
    *[("trap", "{point}")] * 4,
)

# Half of the faults restore one of the snapshots of Redis' data that the others take.
RESTORE_DECK: tuple[tuple[str, str], ...] = (
    *[("snapshot", "redis")] * 4,
    *[("restore", "redis")] * 7,
    *[("restore", "redis settling")] * 3,
    *(("kill", target) for target in ("{broker}", "leader", "{everything}")),
    ("pause", "leader"),
    *[("trap", "{point}")] * 2,
)

NETWORK_DECK: tuple[tuple[str, str], ...] = (
    ("cut", "{rollout} | broker-a broker-b"),
    ("cut", "{broker} | rollout-a rollout-b"),
    ("cut", "{rollout} | reward-a reward-b"),
    *[("cut", "leader | broker-a broker-b")] * 2,
    ("cut", "{broker} | redis"),
    ("cut", "broker-a broker-b | redis"),
    ("cut", "broker-a rollout-a trainer-a | broker-b rollout-b trainer-b redis"),
    ("kill", "leader"),
    ("trap", "{point}"),
)

EVERYTHING = (
    "redis broker-a broker-b",
    "rollout-a rollout-b",
    "trainer-a trainer-b",
    "redis broker-a broker-b reward-a reward-b rollout-a rollout-b trainer-a trainer-b feeder",
)


def draw(seed: int, groups: int, faults: int, deck: Sequence[tuple[str, str]] = PROCESS_DECK) -> list[Fault]:
    """Draw `faults` faults over a run of `groups` groups, in the order in which they are due.

    Every card of the deck is drawn once before any is drawn again; the same holds for the traps' points.
    """
    chance = random.Random(f"{seed}/{groups}/{faults}")
    cards: list[tuple[str, str]] = []
    points: list[str] = []
    drawn = []
    for number in range(faults):
        if not cards:
            cards = chance.sample(deck, len(deck))
        if not points:
            points = chance.sample(POINTS, len(POINTS))
        kind, target = cards.pop()
        if "{point}" in target:
            target = points.pop()
        target = target.replace("{everything}", chance.choice(EVERYTHING))
        for service in ("broker", "reward", "rollout"):
            target = target.replace(f"{{{service}}}", f"{service}-{chance.choice('ab')}")
        # One in each of `faults` equal parts of the run's first 90%, so that the run does not end before the last.
        at = int((number + chance.random()) * 0.9 * groups / faults)
        pick = round(chance.random(), 2) if kind == "restore" else 1.0
        drawn.append(Fault(at, kind, target, _seconds(chance, kind, target), pick))
    return drawn


def family(fault: Fault) -> str:
    """Return the family under which the report counts a fault."""
    if fault.kind not in ("kill", "terminate", "pause"):
        return "kill trainer at a point of its step" if fault.kind == "trap" else fault.kind
    names = fault.target.split()
    return f"{fault.kind} {'several at once' if len(names) > 1 else names[0].partition('-')[0]}"


def _seconds(chance: random.Random, kind: str, target: str) -> float:
    spans = {"pause": REDIS_PAUSE_SECONDS if target == "redis" else PAUSE_SECONDS, "cut": CUT_SECONDS}
    return round(chance.uniform(*spans[kind]), 1) if kind in spans else 0.0
