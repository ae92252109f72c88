"""What a run consists of, in plain Python: lists and dicts, and the steps that several calls share.

It is written to be compared, not to be fast: counts are counted from zero each time, so that no count can drift here.
"""

import copy
import hashlib
import re
from dataclasses import dataclass
from typing import Self

from quartet.v1 import broker_pb2 as pb

LEASE_TTL, MEMBER_TTL, STILL_ASKS = 60_000, 150_000, 1_000  # milliseconds
QUEUED_OR_LEASED, OPEN = ("QUEUED", "LEASED"), ("READY", "LEASED_TO_TRAINER")
SETTLED = ("COMMITTED", "DROPPED", "DELIVERED")
MAX_FIRST_DEAD = 4
COUNTED_SINCE_THE_BEGINNING = ("committed", "dropped", "skipped", "stale", "redelivered", "duplicates", "submitted")


class Refused(Exception):
    """The broker must refuse with this status code."""


@dataclass
class Clock:
    """Redis' clock, in milliseconds."""

    now: int


@dataclass
class Group:
    """One prompt instance."""

    purpose: str
    content: object  # None: known from a checkpoint only
    state: str
    attempt: int = 0
    pinned: int | None = None
    stream: str = ""  # where its ticket stands
    lease: str = ""
    holder: str = ""
    expiry: int = 0
    size: int = 0  # of the stored group
    version: int = 0
    step: int = -1
    problem: str = ""
    source: str = ""
    counted: bool = False  # its accuracy is in `solves`


class Books:
    """One run as it must be."""

    def __init__(self, spec: pb.RunSpec, clock: Clock):
        self.spec, self.clock = spec, clock
        self.groups: dict[str, Group] = {}
        self.streams: dict[str, list[str]] = {}  # names that wait, in order
        self.ready: list[str] = []
        self.batches: dict[int, list[str]] = {}
        self.batch_state: dict[int, str] = {}
        self.members: dict[str, int] = {}  # until when each lives
        self.asking: dict[str, int] = {}  # until when each asks for training prompts
        self.held: dict[str, set[str]] = {}  # leases of training prompts that each was granted
        self.addresses: dict[str, str] = {}
        self.dead: dict[str, int] = {}
        self.solves: dict[str, list[float]] = {}  # accuracies of the groups of each unit of the curriculum
        self.sources: dict[str, dict[str, float]] = {}
        self.since = dict.fromkeys(COUNTED_SINCE_THE_BEGINNING, 0)
        self.put_count = self.put_bytes = 0
        self.first_dead, self.first_dead_reason = 0, ""
        self.version = self.committed = self.session = self.group_epoch = self.settle_to = 0
        self.ledger: tuple[int, str] | None = (0, "")  # steps, and the digest of their batches; None: not known
        self.state, self.ended = "ACTIVE", False

    def copy(self) -> Self:
        """Return a run that goes on from here, by the same clock."""
        return copy.deepcopy(self, {id(self.clock): self.clock})

    # --- counts

    def names(self, *states: str, purpose: str = "TRAIN") -> list[str]:
        return [name for name, group in self.groups.items() if group.state in states and group.purpose == purpose]

    def count(self, *states: str) -> int:
        return len(self.names(*states))

    def bytes_of(self, *states: str) -> int:
        return sum(self.groups[name].size for name in self.names(*states))

    def stats(self) -> dict[str, int]:
        return self.since | {
            "queued": self.count("QUEUED"),
            "leased": self.count("LEASED"),
            "ready": self.count("READY"),
            "leased_to_trainer": self.count("LEASED_TO_TRAINER"),
            "trained": self.count("TRAINED"),
            "dead": len(self.dead),
            "dead_training": self.count("DEAD"),
            "experience_bytes": self.bytes_of("READY", "LEASED_TO_TRAINER", "TRAINED"),
            "untrained_in_flight": len(self.names("QUEUED", "LEASED", purpose="SERVE")),
        }

    def states(self) -> dict[str, tuple[str, int, int]]:
        """Return state, deliveries and step of each training instance."""
        groups = self.groups.items()
        return {name: (group.state, group.attempt, group.step) for name, group in groups if group.purpose == "TRAIN"}

    # --- steps that several calls share

    def enqueue(self, name: str, stream: str) -> None:
        group = self.groups[name]
        group.state, group.stream = "QUEUED", stream
        self.streams.setdefault(stream, []).append(name)

    def home(self, group: Group, train: str) -> str:
        if group.purpose == "TRAIN":
            return train
        return "prompts:serve" if group.pinned is None else f"prompts:pin:{group.pinned}"

    def forget_lease(self, group: Group) -> None:
        group.lease = group.holder = ""
        group.expiry = 0

    def requeue(self, name: str, attempt: int) -> None:
        group = self.groups[name]
        self.forget_lease(group)
        group.attempt, group.size, group.version, group.step = attempt, 0, 0, -1
        self.enqueue(name, self.home(group, "prompts:again"))

    def fail(self, name: str, reason: str, permanent: bool = False) -> bool:
        group = self.groups[name]
        if not permanent and group.attempt < self.spec.max_deliveries:
            self.requeue(name, group.attempt)
            return False
        self.forget_lease(group)
        group.state = "DEAD"
        self.dead[name] = self.clock.now
        if group.purpose == "TRAIN" and not self.put_count:
            same = re.sub(r"\d+", "0", reason) == re.sub(r"\d+", "0", self.first_dead_reason)
            self.first_dead, self.first_dead_reason = self.first_dead * same + 1, reason
        return True

    def settle(self, name: str, final: str) -> None:
        group = self.groups[name]
        self.forget_lease(group)
        group.state, group.size = final, 0

    # --- the curriculum

    def unit_of(self, group: Group) -> str:
        by_source = self.spec.curriculum.by == pb.CURRICULUM_UNIT_SOURCE
        return group.source if by_source else f"{group.source}/{group.problem}"

    def verdict(self, name: str) -> str:
        """Return "solved" or "hopeless" if the curriculum skips an instance, else ""."""
        spec = self.spec.curriculum
        last = self.solves.get(self.unit_of(self.groups[name]), [])[-spec.window :]
        coin = int(hashlib.sha1(name.encode()).hexdigest()[:8], 16) / 2**32
        if not self.spec.HasField("curriculum") or len(last) < spec.window or coin < spec.floor:
            return ""
        mean = sum(last) / len(last)
        return "solved" if mean > spec.solved_above else "hopeless" if mean < spec.hopeless_below else ""

    def keep_accuracy(self, group: Group, accuracy: float | None) -> None:
        if accuracy is None or group.counted:
            return
        group.counted = True
        self.solves.setdefault(self.unit_of(group), []).append(accuracy)
        self.count_source(group, "groups")
        of = self.sources[group.source]
        of["accuracy"] = of.get("accuracy", 0.0) + (accuracy - of.get("accuracy", 0.0)) / min(of["groups"], 50)

    def count_source(self, group: Group, what: str) -> None:
        of = self.sources.setdefault(group.source, {})
        of[what] = of.get(what, 0) + 1

    def holds(self, lease: str) -> str | None:
        """Return the instance of a lease that is held and has not expired."""
        for name, group in self.groups.items():
            if group.lease == lease:
                return name if group.expiry > self.clock.now else None
        return None

    def expire_leases(self) -> None:
        held = [(group.expiry, group.lease, name) for name, group in self.groups.items() if group.lease]
        for expiry, _, name in sorted(held):
            if expiry <= self.clock.now:
                self.fail(name, f"the lease of {self.groups[name].holder} expired")

    def expire_members(self) -> None:
        for name in [name for name, until in self.members.items() if until <= self.clock.now]:
            self.drop_member(name)

    def drop_member(self, name: str) -> None:
        if self.members.pop(name, None) is not None:
            del self.addresses[name]
            self.asking.pop(name, None)
            self.held.pop(name, None)
            self.group_epoch += 1

    def must_be_active(self) -> None:
        if self.state != "ACTIVE":
            raise Refused("FAILED_PRECONDITION")
