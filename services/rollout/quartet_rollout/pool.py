"""Which run a rollout works for, where it may work for several: one at a time, and each with its share of the pool.

A rollout of a pool goes to the run with the fewest rollouts, and stays until that run ends. It leaves earlier only for
a run that has two fewer than its own: then the one that is last by name goes, so that they do not all go at once.
All see the same members, those of the broker, and need no word from each other.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

import grpc
from quartet.v1 import broker_pb2, common_pb2

from quartet_rollout.broker_link import BrokerLink

_SERVES = "serves."
_WILD = frozenset("*?[")


@dataclass(frozen=True)
class _Candidate:
    run: broker_pb2.Run
    rollouts: tuple[broker_pb2.Member, ...]

    @property
    def rank(self) -> tuple[int, int, int, str]:
        """Fewest rollouts first, then the oldest run."""
        made = self.run.created_at
        return len(self.rollouts), made.seconds, made.nanos, self.run.spec.run_id


class RunPool:
    """The runs of `rollout.runs`: names, or patterns as a shell's."""

    def __init__(self, patterns: Iterable[str], link: BrokerLink, instance_id: str):
        self._patterns = tuple(patterns)
        self._link, self._instance_id = link, instance_id
        self.fits: Callable[[broker_pb2.Run], bool] = lambda run: True
        """Whether this rollout's engine can do what a run asks."""

    @property
    def only(self) -> str | None:
        """The one run there is to choose, or None where there may be several."""
        first, *others = self._patterns
        return None if others or _WILD & set(first) else first

    @property
    def capabilities(self) -> list[str]:
        """What the others of the pool have to know: the runs that this rollout could go to."""
        return [] if self.only else [_SERVES + pattern for pattern in self._patterns]

    def __str__(self) -> str:
        return ", ".join(f"'{pattern}'" for pattern in self._patterns)

    async def choose(self) -> str | None:
        """Return the active run with the fewest rollouts, None if there is no active one. Raises grpc.RpcError."""
        candidates = await self._candidates()
        return min(candidates, key=lambda one: one.rank).run.spec.run_id if candidates else None

    async def better(self, own: str) -> str | None:
        """Return the run that this rollout should leave its own for, or None. Raises grpc.RpcError."""
        candidates = {one.run.spec.run_id: one for one in await self._candidates()}
        mine = candidates.pop(own, None)
        if mine is None or not candidates:
            return None
        poorest = min(candidates.values(), key=lambda one: one.rank)
        name = poorest.run.spec.run_id
        if len(mine.rollouts) - len(poorest.rollouts) < 2:
            return None
        may_go = [member.instance_id for member in mine.rollouts if _serves(member, name)]
        return name if may_go and max(may_go) == self._instance_id else None

    async def _candidates(self) -> list[_Candidate]:
        runs = (await self._link.call("ListRuns", broker_pb2.ListRunsRequest())).runs
        return [
            found
            for run in runs
            if run.state == broker_pb2.RUN_STATE_ACTIVE
            and any(fnmatchcase(run.spec.run_id, pattern) for pattern in self._patterns)
            and self.fits(run)
            and (found := await self._look(run)) is not None
        ]

    async def _look(self, run: broker_pb2.Run) -> _Candidate | None:
        request = broker_pb2.GetRunRequest(run_id=run.spec.run_id)
        try:
            response = await self._link.call("GetRun", request)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:  # deleted meanwhile
                return None
            raise
        rollouts = (member for member in response.members if member.kind == common_pb2.SERVICE_KIND_ROLLOUT)
        return _Candidate(response.run, tuple(rollouts))


def _serves(member: broker_pb2.Member, run_id: str) -> bool:
    patterns = (name.removeprefix(_SERVES) for name in member.capabilities if name.startswith(_SERVES))
    return any(fnmatchcase(run_id, pattern) for pattern in patterns)
