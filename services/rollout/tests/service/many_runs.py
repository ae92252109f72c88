"""A broker of several runs, each the in-test broker's, and rollouts of one pool beside it."""

from doubles import InTestBroker
from quartet.v1 import broker_pb2, broker_pb2_grpc

from quartet_common.errors import not_found


class ManyRuns(broker_pb2_grpc.BrokerServiceServicer):
    """Hands each call to the run that it is about."""

    def __init__(self) -> None:
        self.runs: dict[str, InTestBroker] = {}

    def create(self, run_id: str, **fields) -> InTestBroker:
        made = self.runs[run_id] = InTestBroker()
        made.create_run(run_id=run_id, **fields)
        made.run.created_at.seconds = len(self.runs)
        return made

    async def close(self) -> None:
        for one in self.runs.values():
            await one.close()

    async def ListRuns(self, request, context):  # noqa: N802
        return broker_pb2.ListRunsResponse(runs=[one.run for one in self.runs.values()])

    async def GetRun(self, request, context):  # noqa: N802
        one = self._of(request)
        return broker_pb2.GetRunResponse(run=one.run, members=one.members.values())

    def _of(self, request) -> InTestBroker:
        if request.run_id not in self.runs:
            raise not_found("run", request.run_id)
        return self.runs[request.run_id]


def _handed_on(name: str):
    async def call(self, request, context):
        return await getattr(self._of(request), name)(request, context)

    return call


for _name in (
    "RegisterMember",
    "Heartbeat",
    "LeaveMember",
    "LeasePrompts",
    "RenewLeases",
    "ReleaseLeases",
    "PutExperience",
):
    setattr(ManyRuns, _name, _handed_on(_name))
