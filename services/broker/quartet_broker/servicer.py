"""BrokerService: each RPC handed on to the part it is about."""

import grpc
from quartet.v1 import broker_pb2, broker_pb2_grpc

from quartet_broker.audit import Audit
from quartet_broker.bell import Bell
from quartet_broker.config import BrokerSection
from quartet_broker.dead import Dead
from quartet_broker.evaluations import Evaluations
from quartet_broker.events import Events
from quartet_broker.experience import Experience
from quartet_broker.members import Members
from quartet_broker.prompts import Prompts
from quartet_broker.puts import put_handler
from quartet_broker.results import Results
from quartet_broker.runs import Runs, state_value
from quartet_broker.servers import Servers
from quartet_broker.sessions import Sessions
from quartet_broker.store import Store

# gRPC names methods in CamelCase.
# ruff: noqa: N802

SERVICE = broker_pb2.DESCRIPTOR.services_by_name["BrokerService"].full_name


class BrokerServicer(broker_pb2_grpc.BrokerServiceServicer):
    """The contract's methods over one Redis."""

    def __init__(self, servers: Servers, section: BrokerSection):
        self.store = Store(servers, section)
        self.bell = Bell(servers)
        self.members = Members(self.store, self.bell)
        self.runs = Runs(self.store, self.members, section)
        self.prompts = Prompts(self.store, self.bell, self.runs)
        self.dead = Dead(self.store)
        self.experience = Experience(self.store, self.bell, section)
        self.sessions = Sessions(self.store, self.runs, self.dead)
        self.evaluations = Evaluations(self.store, self.bell)
        self.results = Results(self.store, self.bell, self.dead)
        self.events = Events(self.store, self.bell)
        self.audit = Audit(self.store, self.runs)

    async def CreateRun(self, request, context):
        return await self.runs.create(request)

    async def GetRun(self, request, context):
        return await self.runs.get(request)

    async def ListRuns(self, request, context):
        return await self.runs.list_all()

    async def FinishRun(self, request, context):
        return await self.runs.finish(request)

    async def DeleteRun(self, request, context):
        return await self.runs.delete(request)

    async def SubmitPrompts(self, request, context):
        return await self.prompts.submit(request)

    async def EndPrompts(self, request, context):
        return await self.prompts.end(request)

    async def LeasePrompts(self, request, context):
        return await self.prompts.lease(request, context)

    async def RenewLeases(self, request, context):
        return await self.prompts.renew(request)

    async def ReleaseLeases(self, request, context):
        return await self.prompts.release(request)

    async def GetUnscored(self, request, context):
        return await self.prompts.unscored(request)

    async def PutExperience(self, request, context):
        return await self.experience.put(request)

    async def OpenSession(self, request, context):
        return await self.sessions.open(request)

    async def SettleTrained(self, request, context):
        return await self.sessions.settle_trained(request)

    async def LeaseExperience(self, request, context):
        async for response in self.experience.lease(request, context):
            yield response

    async def DropExperience(self, request, context):
        return await self.experience.drop(request)

    async def MarkTrained(self, request, context):
        return await self.sessions.mark_trained(request)

    async def Commit(self, request, context):
        return await self.sessions.commit(request)

    async def RegisterMember(self, request, context):
        epoch = await self.members.register(request.run_id, request.member)
        return broker_pb2.RegisterMemberResponse(group_epoch=epoch, run=await self.runs.load(request.run_id))

    async def Heartbeat(self, request, context):
        epoch, state, version = await self.members.heartbeat(request)
        return broker_pb2.HeartbeatResponse(group_epoch=epoch, run_state=state_value(state), policy_version=version)

    async def LeaveMember(self, request, context):
        return await self.members.leave(request)

    async def WatchMembers(self, request, context):
        async for response in self.members.watch(request):
            yield response

    async def StartEvaluation(self, request, context):
        return await self.evaluations.start(request)

    async def GetEvaluation(self, request, context):
        return await self.evaluations.get(request, context)

    async def CollectResults(self, request, context):
        async for response in self.results.collect(request):
            yield response

    async def ReportProgress(self, request, context):
        return await self.events.report(request)

    async def WatchRun(self, request, context):
        async for response in self.events.watch(request):
            yield response

    async def ListDead(self, request, context):
        return await self.dead.list_dead(request)

    async def RequeueDead(self, request, context):
        return await self.dead.requeue(request)

    async def GetGroup(self, request, context):
        return await self.dead.group(request)

    async def AuditRun(self, request, context):
        async for response in self.audit.run(request):
            yield response


def add_to(server: grpc.aio.Server, servicer: BrokerServicer) -> None:
    """Have a server answer the contract's calls."""
    broker_pb2_grpc.add_BrokerServiceServicer_to_server(servicer, server)
    # In place of the one just added: its requests are cut, not parsed.
    server.add_registered_method_handlers(SERVICE, {"PutExperience": put_handler(servicer.PutExperience)})
