"""The broker's state machine once more, in plain Python: one run, no Redis, no time but `clock`.

Each method is one call of the contract. It returns what the broker must answer, or raises Refused, and makes the same
change. `stats` and `states` are what the broker's audit must say afterwards.
"""

import hashlib

from model_books import (
    LEASE_TTL,
    MAX_FIRST_DEAD,
    MEMBER_TTL,
    OPEN,
    QUEUED_OR_LEASED,
    SETTLED,
    STILL_ASKS,
    Books,
    Group,
    Refused,
)
from quartet.v1 import broker_pb2 as pb


def problem_of(name: str) -> tuple[str, str]:
    """Return the problem and the source of an instance: eight problems of two sources."""
    number = int(name[1:])
    return f"q{number % 8}", "ab"[number % 2]


def ledger_digest(batches: list[list[str]], before: str = "") -> str:
    """Return OpenSessionResponse.ledger_digest of batches after those of which `before` is the digest."""
    for names in batches:
        before = hashlib.sha1("\n".join([before, *names]).encode()).hexdigest()
    return before


class Reference(Books):
    """The calls."""

    # --- clients

    def submit(self, items: list[tuple[str, str, object, int | None]]) -> tuple[int, int]:
        """Queue (name, purpose, content, pinned version) of each; return accepted, duplicates."""
        unique: dict[str, tuple] = {}
        for item in items:
            if unique.setdefault(item[0], item) != item:
                raise Refused("INVALID_ARGUMENT")
        self.must_be_active()
        fresh = []
        for name, purpose, content, pinned in unique.values():
            known = self.groups.get(name)
            if known is None:
                fresh.append((name, purpose, content, pinned))
            elif known.content not in (content, None):
                raise Refused("ALREADY_EXISTS")
        if self.ended and any(purpose == "TRAIN" for _, purpose, _, _ in fresh):
            raise Refused("FAILED_PRECONDITION")
        serving = [group for group in self.groups.values() if group.stream == "prompts:serve"]
        waiting = self.count("QUEUED") + sum(group.state in QUEUED_OR_LEASED for group in serving)
        if len(fresh) > self.spec.max_queued_prompts:
            raise Refused("INVALID_ARGUMENT")
        if fresh and waiting + len(fresh) > self.spec.max_queued_prompts:
            raise Refused("RESOURCE_EXHAUSTED")
        for name, _, content, _ in unique.values():
            if name in self.groups and self.groups[name].content is None:
                self.groups[name].content = content
        for name, purpose, content, pinned in fresh:
            problem, source = problem_of(name)
            self.groups[name] = Group(purpose, content, "QUEUED", pinned=pinned, problem=problem, source=source)
            self.enqueue(name, self.home(self.groups[name], "prompts:train"))
        self.since["submitted"] += len(fresh)
        return len(fresh), len(items) - len(fresh)

    def end_prompts(self) -> None:
        self.ended = True

    def finish(self, state: str) -> str:
        """FinishRun; return the outcome that stands."""
        self.state = state if self.state == "ACTIVE" else self.state
        return self.state

    def requeue_dead(self, names: list[str]) -> int:
        """RequeueDead; no names: all."""
        self.must_be_active()
        chosen = names or [name for _, name in sorted((at, name) for name, at in self.dead.items())]
        back = [name for name in dict.fromkeys(chosen) if name in self.dead]
        self.first_dead = 0 if back else self.first_dead
        for name in back:
            del self.dead[name]
            group = self.groups[name]
            group.attempt = 0
            self.enqueue(name, self.home(group, "prompts:again"))
        return len(back)

    # --- members

    def register(self, name: str, address: str) -> int:
        """RegisterMember of a rollout; return the group epoch."""
        self.expire_members()
        if self.addresses.get(name) != address:
            self.group_epoch += 1
        self.addresses[name] = address
        self.members[name] = self.clock.now + MEMBER_TTL
        return self.group_epoch

    def heartbeat(self, name: str) -> tuple[int, int]:
        """Heartbeat; return group epoch and policy version."""
        self.expire_members()
        if name not in self.members:
            raise Refused("NOT_FOUND")
        self.members[name] = self.clock.now + MEMBER_TTL
        return self.group_epoch, self.version

    def leave(self, name: str) -> int:
        """LeaveMember; return the group epoch."""
        self.drop_member(name)
        return self.group_epoch

    def sweep(self) -> None:
        self.expire_members()
        self.expire_leases()

    # --- rollouts

    def lease_prompts(self, holder: str, most: int, version: int) -> tuple[list[tuple[str, int]], str]:
        """LeasePrompts; return (name, attempt) of each, and the gate.

        `granted` must be told the lease ids.
        """
        self.must_be_active()
        if self.members.get(holder, 0) <= self.clock.now:
            raise Refused("FAILED_PRECONDITION")
        self.expire_leases()
        names = self._pull(f"prompts:pin:{version}", most)
        names += self._pull("prompts:serve", most - len(names))
        gate = ""
        if len(names) < most:
            by_staleness, by_memory = self._gate(version)
            most -= len(names)
            by_share = self._fair_share(holder, min(by_staleness, by_memory))
            room = min(most, by_staleness, by_memory, by_share)
            trained = self._pull("prompts:again", room)
            trained += self._pull_new(room - len(trained))
            if len(trained) < room:
                gate = "NO_PROMPTS"
            elif len(trained) < most:
                gate = "STALENESS" if by_staleness <= by_memory else "MEMORY"
                gate = "SHARE" if by_share < min(by_staleness, by_memory) else gate
            names += trained
        for name in names:
            group = self.groups[name]
            group.attempt += 1
            self.since["redelivered"] += group.attempt > 1
            group.state, group.holder, group.expiry = "LEASED", holder, self.clock.now + LEASE_TTL
        return [(name, self.groups[name].attempt) for name in names], gate

    def _fair_share(self, holder: str, room: int) -> int:
        """What a holder may get of `room`: an equal part of what those who ask hold and could get; alone, all of it.

        The broker sees only when a member asks that leases of its own have ended; so does this.
        """
        self.asking[holder] = self.clock.now + STILL_ASKS
        self.asking = {name: until for name, until in self.asking.items() if until > self.clock.now}
        valid = {group.lease for group in self.groups.values() if group.state == "LEASED"}
        self.held[holder] = self.held.get(holder, set()) & valid
        if len(self.asking) == 1:
            return max(0, room)
        shared = max(0, room) + sum(len(self.held.get(name, ())) for name in self.asking)
        return max(0, -(-shared // len(self.asking)) - len(self.held[holder]))

    def _pull(self, stream: str, most: int) -> list[str]:
        waiting = self.streams.get(stream, [])
        taken = waiting[: max(0, most)]
        self.streams[stream] = waiting[len(taken) :]
        return taken

    def _pull_new(self, most: int) -> list[str]:
        """Take from prompts:train; what the curriculum skips on the way is dropped."""
        waiting, taken = self.streams.get("prompts:train", []), []
        while waiting and len(taken) < most:
            name = waiting.pop(0)
            verdict = self.verdict(name)
            self.count_source(self.groups[name], verdict or "used")
            if not verdict:
                taken.append(name)
                continue
            self.settle(name, "DROPPED")
            self.since["dropped"] += 1
            self.since["skipped"] += 1
        return taken

    def _gate(self, version: int) -> tuple[int, int]:
        spec, leased = self.spec, self.count("LEASED")
        under_way = leased + self.count(*OPEN)
        by_staleness = (min(version, self.version) - self.version + spec.max_staleness + 1) * spec.groups_per_step
        by_staleness -= under_way
        if not self.put_bytes:
            return by_staleness, by_staleness
        mean = self.put_bytes / self.put_count
        by_memory = int((spec.max_experience_bytes - self.bytes_of(*OPEN)) // mean) - leased
        return by_staleness, max(by_memory, spec.groups_per_step - under_way)

    def granted(self, name: str, lease: str) -> None:
        """The broker chose this lease id."""
        group = self.groups[name]
        group.lease = lease
        if group.purpose == "TRAIN":
            self.held.setdefault(group.holder, set()).add(lease)

    def renew(self, leases: list[str]) -> list[str]:
        """RenewLeases; return those that are lost."""
        lost = [lease for lease in leases if self.state != "ACTIVE" or self.holds(lease) is None]
        for lease in leases:
            if lease not in lost:
                self.groups[str(self.holds(lease))].expiry = self.clock.now + LEASE_TTL
        return lost

    def release(self, releases: list[tuple[str, str, bool]]) -> tuple[int, int, list[str]]:
        """ReleaseLeases of (lease, failure, permanent); return requeued, dead, lost."""
        requeued, dead, lost = 0, 0, []
        for lease, failure, permanent in releases:
            name = self.holds(lease)
            if name is None:
                lost.append(lease)
            elif not failure and not permanent:
                self.requeue(name, self.groups[name].attempt - 1)
                requeued += 1
            elif self.fail(name, failure or "refused for good, without a reason", permanent):
                dead += 1
            else:
                requeued += 1
        if self.first_dead >= MAX_FIRST_DEAD and not self.put_count:
            self.finish("FAILED")
        return requeued, dead, lost

    def put(self, puts: list[tuple[str, str, int, int, int, float | None]]) -> list[str]:
        """PutExperience of (name, lease, bytes, oldest and newest version, accuracy) of each; return the outcomes."""
        outcomes = [self._put_one(*put) for put in puts]
        if "LEASE_LOST" in outcomes:
            self.expire_leases()
        return outcomes

    def _put_one(self, name: str, lease: str, size: int, oldest: int, newest: int, accuracy: float | None) -> str:
        group = self.groups.get(name)
        if group and group.state in (*OPEN, "TRAINED", *SETTLED):
            self.since["duplicates"] += 1
            return "DUPLICATE"
        if self.state != "ACTIVE":
            return "FINISHED"
        if group is None or self.holds(lease) != name:
            return "LEASE_LOST"
        if group.purpose == "TRAIN":
            return self._put_training(name, group, size, oldest, accuracy)
        if group.pinned is not None and not oldest == newest == group.pinned:
            self.requeue(name, 0)
            return "STALE"
        self.settle(name, "DELIVERED")
        return "ACCEPTED"

    def _put_training(self, name: str, group: Group, size: int, oldest: int, accuracy: float | None) -> str:
        spec = self.spec
        if self.version - oldest > spec.max_staleness:
            self.since["stale"] += 1
            self.requeue(name, 0)
            return "STALE"
        if self.bytes_of(*OPEN) + size > spec.max_experience_bytes and self.count(*OPEN) >= spec.groups_per_step:
            return "NO_ROOM"
        self.forget_lease(group)
        group.state, group.size, group.version = "READY", size, min(oldest, self.version)
        self.ready.append(name)
        self.keep_accuracy(group, accuracy)
        self.put_count += 1
        self.put_bytes += size
        return "ACCEPTED"

    # --- the trainer

    def _must_be_newest(self, session: int, settling: bool = False) -> None:
        if session != self.session:
            if self.session < session <= self.clock.now:
                self.session = session + 1
            raise Refused("FAILED_PRECONDITION")
        if not settling and self.committed < self.settle_to:
            raise Refused("FAILED_PRECONDITION")

    def next_step(self) -> int:
        """Return the first step that has no batch yet."""
        return max([self.version, *(step + 1 for step in self.batches)])

    def prompts_are_over(self) -> bool:
        """True when no training prompt waits or is at a rollout, and none will come."""
        return self.ended and not self.count("QUEUED", "LEASED")

    def open(self, checkpoint: int, consumed: list[str] | None, epoch: int) -> tuple[int, int, str]:
        """OpenSession; return the steps to be replayed, the first to be settled, the digest of those before.

        Args:
            consumed: ids of the last steps; None: the ledger will be settled.
            epoch: what the broker gave.
        """
        if checkpoint < self.committed:
            raise Refused("FAILED_PRECONDITION")
        if consumed is not None:
            covered = checkpoint - -(-len(consumed) // self.spec.groups_per_step)
            if any(self.batch_state.get(step) != "TRAINED" for step in range(self.committed, covered)):
                raise Refused("FAILED_PRECONDITION")
        assert epoch == max(self.session + 1, self.clock.now)
        self.session, self.version, self.settle_to = epoch, checkpoint, checkpoint
        later = [step for step in self.batches if step >= checkpoint and self.batch_state[step] != "SHORT"]
        for step in later:
            self.batch_state[step] = "GRANTED"
            for name in self.batches[step]:
                self.groups[name].state = "LEASED_TO_TRAINER"
        if consumed is None:
            digest = self.ledger[1] if self.ledger and self.ledger[0] == self.committed else ""
            return len(later), self.committed, digest
        if sum([self._consume(name) for name in consumed]):
            self.ledger = None
        self._commit_below(checkpoint)
        return len(later), 0, ""

    def settle_trained(self, session: int, step: int, names: list[str]) -> tuple[int, int]:
        """SettleTrained of one step; return the steps settled, and how many groups were elsewhere."""
        self._must_be_newest(session, settling=True)
        if step < self.committed:
            return self.committed, 0
        if step > self.committed or step >= self.settle_to:
            raise Refused("FAILED_PRECONDITION")
        found = sum([self._consume(name, step) for name in names])
        self._dissolve(step)
        self._advance(step, names)
        return self.committed, found

    def _consume(self, name: str, step: int = -1) -> bool:
        group = self.groups.get(name)
        if group is None:
            self.groups[name] = Group("TRAIN", None, "COMMITTED", attempt=1, step=step)
        elif group.state == "DROPPED" and step >= 0:
            group.state, group.step = "COMMITTED", step
            self.since["dropped"] -= 1
        elif group.state in SETTLED:
            return False
        else:
            for names in (*self.streams.values(), self.ready):
                if name in names:
                    names.remove(name)
            self.dead.pop(name, None)
            if group.step >= 0:
                self.batches[group.step].remove(name)
                if self.batch_state[group.step] != "TRAINED":
                    self.batch_state[group.step] = "SHORT"
            group.step = step if step >= 0 else group.step
            self.settle(name, "COMMITTED")
        self.since["committed"] += 1
        return True

    def _dissolve(self, step: int) -> None:
        self.batch_state.pop(step, None)
        for name in self.batches.pop(step, []):
            self.requeue(name, 0)

    def _advance(self, step: int, names: list[str]) -> None:
        if step != self.committed:
            return
        self.committed += 1
        if self.ledger and self.ledger[0] == step:
            self.ledger = step + 1, ledger_digest([names], self.ledger[1])

    def lease_batch(self, session: int, step: int) -> dict[str, object]:
        """LeaseExperience; return what the manifest must say."""
        self._must_be_newest(session)
        if self.state != "ACTIVE":
            return {"run_finished": True}
        if step < self.committed:
            raise Refused("FAILED_PRECONDITION")
        if self.batch_state.get(step) in ("GRANTED", "TRAINED"):
            return self._manifest(step, replayed=True)
        if step not in self.batches and step != self.next_step():
            raise Refused("FAILED_PRECONDITION")
        by_version = sorted(self.ready, key=lambda name: self.groups[name].version)
        for name in [name for name in by_version if self.groups[name].version < step - self.spec.max_staleness]:
            self.since["stale"] += 1
            self.ready.remove(name)
            self.requeue(name, 0)
        have = self.batches.get(step, [])
        needed, over = self.spec.groups_per_step - len(have), self.prompts_are_over()
        if len(self.ready) < needed and over and self.spec.partial_batch == pb.PARTIAL_BATCH_POLICY_DROP:
            for name in (*self.ready, *have):
                self.settle(name, "DROPPED")
            self.since["dropped"] += len(self.ready) + len(have)
            self.ready = []
            self.batches.pop(step, None)
            self.batch_state.pop(step, None)
            return {"ready": 0, "needed": needed, "end_of_data": True}
        if len(self.ready) < needed and not (over and self.ready + have):
            return {"ready": len(self.ready), "needed": needed, "end_of_data": over}
        order = list(self.ready)
        sign = -1 if self.spec.lease_order == pb.LEASE_ORDER_FRESH_FIRST else 1
        order.sort(key=lambda name: sign * self.groups[name].version)
        self.batches[step] = have + order[:needed]
        self.batch_state[step] = "GRANTED"
        for name in order[:needed]:
            self.ready.remove(name)
            self.groups[name].state, self.groups[name].step = "LEASED_TO_TRAINER", step
        return self._manifest(step, replayed=False)

    def _manifest(self, step: int, replayed: bool) -> dict[str, object]:
        last = self.prompts_are_over() and not self.ready and self.next_step() == step + 1
        return {"instance_ids": list(self.batches[step]), "replayed": replayed, "end_of_data": last}

    def drop(self, session: int, step: int, names: list[str]) -> int:
        """DropExperience; return how many it dropped."""
        self._must_be_newest(session)
        if step < self.committed or self.batch_state.get(step) == "TRAINED":
            raise Refused("FAILED_PRECONDITION")
        chosen = [name for name in dict.fromkeys(names) if name in self.batches.get(step, ())]
        for name in chosen:
            self.batches[step].remove(name)
            self.batch_state[step] = "SHORT"
            self.settle(name, "DROPPED")
        self.since["dropped"] += len(chosen)
        return len(chosen)

    def mark_trained(self, session: int, step: int, names: list[str]) -> int:
        """MarkTrained of a batch, or of what is granted if it is empty; return the policy version."""
        self._must_be_newest(session)
        if names and self.batches.get(step, names) != names:
            raise Refused("FAILED_PRECONDITION")
        if step > self.version or (step == self.version and self.batch_state.get(step) != "GRANTED"):
            raise Refused("FAILED_PRECONDITION")
        if step == self.version:
            self.batch_state[step] = "TRAINED"
            for name in self.batches[step]:
                self.groups[name].state = "TRAINED"
            self.version += 1
        return step + 1

    def commit(self, session: int, step: int) -> int:
        """Commit; return the groups it let go."""
        self._must_be_newest(session)
        if step > self.version:
            raise Refused("FAILED_PRECONDITION")
        return self._commit_below(step)

    def _commit_below(self, target: int) -> int:
        committed = 0
        for step in sorted(step for step in self.batches if step < target):
            if self.batch_state[step] != "TRAINED":
                self._dissolve(step)
                continue
            del self.batch_state[step]
            names = self.batches.pop(step)
            for name in names:
                self.settle(name, "COMMITTED")
            self._advance(step, names)
            self.since["committed"] += len(names)
            committed += len(names)
        self.committed = max(self.committed, target)
        return committed
