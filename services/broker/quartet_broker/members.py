"""Members: a run's live rollouts and trainers, and the group epoch, which grows when the set of rollouts changes."""

from collections.abc import AsyncGenerator
from functools import partial

from quartet.v1 import broker_pb2, common_pb2

from quartet_broker import scripts, validation
from quartet_broker.notifier import Notifier
from quartet_broker.store import Store
from quartet_broker.streams import SharedReads
from quartet_common.errors import invalid_argument, not_found, resource_exhausted, unavailable

_READS_AT_ONCE = 2
_KINDS = {common_pb2.SERVICE_KIND_ROLLOUT: "ROLLOUT", common_pb2.SERVICE_KIND_TRAINER: "TRAINER"}


def _check(member: broker_pb2.Member) -> None:
    validation.identifier("member.instance_id", member.instance_id)
    validation.version("member.policy_version", member.policy_version, -1)
    if member.state not in broker_pb2.MemberState.values():
        raise invalid_argument("member.state", came=member.state, allowed="JOINING, ACTIVE or DRAINING")


def _mark(member: broker_pb2.Member) -> str:
    """Return the fields whose change wakes watchers; gauges do not."""
    return f"{member.state}|{member.policy_version}|{member.waiting_for}"


def _changed(member: broker_pb2.Member) -> bytes:
    return broker_pb2.RunEvent(member=broker_pb2.MemberChanged(member=member)).SerializeToString()


class Members:
    """RegisterMember, Heartbeat, LeaveMember, WatchMembers."""

    def __init__(self, store: Store, watched: Store, notifier: Notifier, most: int, any_address: bool = False):
        """`watched`: what watchers read from. `most`: live members of a run. `any_address`: see `check_member`."""
        self._store = store
        self._watched = watched
        self._notifier = notifier
        self._reads = SharedReads(_READS_AT_ONCE)
        self._most = most
        self._any_address = any_address

    async def register(self, run_id: str, member: broker_pb2.Member) -> int:
        """Announce a member; return the group epoch after it joined."""
        validation.name("run_id", run_id)
        _check(member)
        if member.kind not in _KINDS:
            raise invalid_argument("member.kind", came=member.kind, allowed="SERVICE_KIND_ROLLOUT or _TRAINER")
        validation.identifier("member.address", member.address)
        validation.check_member(member, self._any_address)
        reply = await self._store.run(
            scripts.REGISTER_MEMBER,
            run_id,
            member.instance_id,
            _KINDS[member.kind],
            member.address,
            member.state,
            _mark(member),
            validation.stored("member", member),
            _changed(member),
            self._most,
        )
        if reply[0] == b"FULL":
            raise resource_exhausted(
                f"members of run '{run_id}'",
                f"{reply[1]} are alive and at most {self._most} may be (broker.max_members)",
            )
        return int(reply[1])

    async def heartbeat(self, request: broker_pb2.HeartbeatRequest) -> tuple[int, bytes, int]:
        """Keep a member alive; return group epoch, the run's state as Redis keeps it, and policy version."""
        validation.name("run_id", request.run_id)
        member = request.member
        _check(member)
        reply = await self._store.run(
            scripts.HEARTBEAT,
            request.run_id,
            member.instance_id,
            member.state,
            _mark(member),
            validation.stored("member", member),
            _changed(member),
        )
        if reply[0] == b"GONE":
            raise not_found("member", member.instance_id, "its ttl has passed, or it left: register again")
        return int(reply[1]), reply[2], int(reply[3])

    async def leave(self, request: broker_pb2.LeaveMemberRequest) -> broker_pb2.LeaveMemberResponse:
        """Remove a member at once."""
        validation.name("run_id", request.run_id)
        validation.identifier("instance_id", request.instance_id)
        reply = await self._store.run(scripts.LEAVE_MEMBER, request.run_id, request.instance_id)
        return broker_pb2.LeaveMemberResponse(group_epoch=int(reply[1]))

    async def alive(self, run_id: str) -> tuple[int, list[broker_pb2.Member]]:
        """Return the group epoch and the live members, by instance id."""
        return _alive(await self._store.run(scripts.LIST_MEMBERS, run_id))

    async def _membership(self, run_id: str) -> tuple[list[tuple[str, str]], bytes]:
        """Return what watchers are sent a response for when it changes, and the serialized response."""
        epoch, members = _alive(await self._watched.run(scripts.LIST_MEMBERS, run_id))
        marks = [(str(epoch), ""), *((member.instance_id, _mark(member)) for member in members)]
        return marks, broker_pb2.WatchMembersResponse(group_epoch=epoch, members=members).SerializeToString()

    async def watch(self, request: broker_pb2.WatchMembersRequest) -> AsyncGenerator[bytes]:
        """Yield serialized responses, of the membership now and at each change, until the caller leaves."""
        run_id = validation.name("run_id", request.run_id)
        sent = None
        waiter = self._notifier.waiter(run_id, "members")
        while True:
            waiter.clear()
            marks, response = await self._reads.read(run_id, partial(self._membership, run_id))
            if marks != sent:
                yield response
                sent = marks
            if not await waiter.wait():
                raise unavailable("broker", "it is stopping; watch again")


def _alive(reply: list) -> tuple[int, list[broker_pb2.Member]]:
    return int(reply[1]), [_merge(reply[n], reply[n + 1]) for n in range(2, len(reply), 2)]


def _merge(registration: bytes, beat: bytes) -> broker_pb2.Member:
    """Return a member as it is now: its registration, overlaid with its last heartbeat."""
    member = broker_pb2.Member.FromString(registration)
    if beat:
        now = broker_pb2.Member.FromString(beat)
        member.state, member.policy_version, member.waiting_for = now.state, now.policy_version, now.waiting_for
        member.gauges.clear()
        for name, value in now.gauges.items():
            member.gauges[name] = value
    return member
