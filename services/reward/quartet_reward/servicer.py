"""The RPCs of RewardService. The proto is their specification."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property

import grpc
from quartet.v1 import reward_pb2, reward_pb2_grpc

from quartet_common.errors import ContractError, invalid_argument, resource_exhausted, unavailable
from quartet_reward.admission import Admission
from quartet_reward.config import MOST_ITEMS
from quartet_reward.execution import Executor
from quartet_reward.scoring import Result, Scorer, Work
from quartet_reward.stream import ScoreStream, in_strides
from quartet_reward.verifiers.base import Verifier


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Score, ScoreStream, ListVerifiers, Execute."""

    def __init__(
        self, scorer: Scorer, verifiers: Mapping[str, Verifier], admission: Admission, executor: Executor | None
    ):
        """`executor`: None where there is no sandbox."""
        self._scorer = scorer
        self._executor = executor
        self._verifiers = verifiers
        self._admission = admission
        self.draining = False

    async def Score(  # noqa: N802
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ScoreResponse:
        """Verify a batch."""
        if self.draining:
            raise unavailable("reward", "the service is shutting down")
        if not 1 <= len(request.items) <= MOST_ITEMS:
            raise invalid_argument("items", f"{len(request.items)} items", f"1 to {MOST_ITEMS}")
        _refuse_duplicates(request.items)
        results: list[Result | Work] = []
        async for i, item, size in in_strides(request.items):
            results.append(self._scorer.score(item, f"items[{i}]", size))
        return reward_pb2.ScoreResponse(results=await self._finish(request.items, results))

    async def _finish(self, items: Sequence[reward_pb2.ScoreItem], results: list[Result | Work]) -> list[Result]:
        """Do the work among `results`, all side by side; it is cancelled with the call, which has the deadline."""
        work = {i: one for i, one in enumerate(results) if not isinstance(one, reward_pb2.ScoreResult)}
        wanted, extra = Counter(items[i].run_id for i in work), MOST_ITEMS - len(work)
        for i, one in work.items():  # no call takes more places than it may have items
            more = min(one.places - 1, extra)
            wanted[items[i].run_id] += more
            extra -= more
        if not self._admission.try_take_all(wanted):
            raise self._full(wanted)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {i: group.create_task(one.run()) for i, one in work.items()}
        finally:
            for run, count in wanted.items():
                self._admission.give(run, count)
        return [tasks[i].result() if i in tasks else one for i, one in enumerate(results)]

    def _full(self, wanted: Counter[str]) -> ContractError:
        run, count = max(wanted.items(), key=lambda entry: entry[1] - self._admission.free_for(entry[0]))
        return resource_exhausted(
            "reward.max_queue",
            f"the queue has room for {self._admission.free_for(run)} items of run '{run}' and this call needs {count}",
            self._admission.seconds_until(run, count),
        )

    async def ScoreStream(self, request_iterator, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        """Verify items as they come."""
        await ScoreStream(self._scorer, self._admission, context.write, lambda: self.draining).run(request_iterator)

    async def ListVerifiers(  # noqa: N802
        self, request: reward_pb2.ListVerifiersRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ListVerifiersResponse:
        """List the verifiers with the schema of their parameters."""
        return self._listed

    @cached_property
    def _listed(self) -> reward_pb2.ListVerifiersResponse:
        """Made once: pydantic takes some 100 ms of the event loop for the schemas."""
        infos = [
            reward_pb2.VerifierInfo(
                name=name,
                description=verifier.description,
                parameters_schema=json.dumps(verifier.parameters.model_json_schema()),
            )
            for name, verifier in self._verifiers.items()
        ]
        return reward_pb2.ListVerifiersResponse(verifiers=infos)

    async def Execute(  # noqa: N802
        self, request: reward_pb2.ExecuteRequest, context: grpc.aio.ServicerContext
    ) -> reward_pb2.ExecuteResponse:
        """Run a program; it is killed with the call."""
        if self.draining:
            raise unavailable("reward", "the service is shutting down")
        if self._executor is None:
            raise unavailable("sandbox", "this service has none")
        return await self._executor.execute(request)


def _refuse_duplicates(items: Sequence[reward_pb2.ScoreItem]) -> None:
    first: dict[str, int] = {}
    for i, item in enumerate(items):
        if (other := first.setdefault(item.item_id, i)) != i:
            raise invalid_argument(
                f"items[{i}].item_id", f"'{item.item_id}', which items[{other}] has", "a name unique in its call"
            )
