"""BrokerService: forwards each RPC to the part that implements it."""

from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2

from quartet_broker import validation
from quartet_broker.audit import Audit
from quartet_broker.config import BrokerSection
from quartet_broker.events import Events
from quartet_broker.experience import Experience
from quartet_broker.members import Members
from quartet_broker.notifier import Notifier
from quartet_broker.prompts import Evaluations, Prompts
from quartet_broker.results import DeadLetters, History, Results
from quartet_broker.runs import Runs, state_value
from quartet_broker.servers import Servers, connect
from quartet_broker.sessions import Sessions
from quartet_broker.store import Store
from quartet_broker.streams import Streams
from quartet_server.host import ServiceHost
from quartet_server.wire import put_handler

# gRPC names methods in CamelCase.
# ruff: noqa: N802

_WATCHERS_CONNECTIONS = 16
SERVICE = broker_pb2.DESCRIPTOR.services_by_name["BrokerService"].full_name


class BrokerServicer(broker_pb2_grpc.BrokerServiceServicer):
    """The contract's methods over one Redis."""

    def __init__(self, servers: Servers, section: BrokerSection, max_message_bytes: int = 64 << 20):
        # The largest prompt, and what a response lists of many callers, may fill a quarter of a message.
        answer_bytes = min(max_message_bytes // 4, validation.MOST_BYTES[experience_pb2.PromptInstance])
        self.store = Store(servers, section)
        # A separate connection pool, so that calls do not wait for watchers.
        self._watched = connect(section.model_copy(update={"redis_connections": _WATCHERS_CONNECTIONS}))
        watched = Store(self._watched, section)
        self.streams = Streams(section.max_streams_per_peer, section.watcher_patience)
        self.notifier = Notifier(servers)
        most_members = answer_bytes // (2 * validation.MOST_BYTES[broker_pb2.Member])  # registration and heartbeat
        most_members = min(section.max_members, most_members)
        self.members = Members(self.store, watched, self.notifier, most_members, section.any_member_address)
        self.runs = Runs(self.store, self.members, section, answer_bytes)
        self.prompts = Prompts(self.store, self.notifier, self.runs, answer_bytes)
        self.dead_letters = DeadLetters(self.store, answer_bytes)
        self.history = History(self.store)
        self.experience = Experience(self.store, self.notifier, section)
        self.sessions = Sessions(self.store, self.runs, self.dead_letters)
        self.evaluations = Evaluations(self.store, self.notifier, max_message_bytes - answer_bytes)
        self.results = Results(watched, self.notifier, DeadLetters(watched, answer_bytes))
        self.events = Events(self.store, watched, self.notifier)
        self.audit = Audit(watched, self.runs)

    async def aclose(self) -> None:
        """Close the watchers' connections to Redis."""
        await self._watched.aclose()

    async def CreateRun(self, request, context):
        return await self.runs.create(request)

    async def GetRun(self, request, context):
        return await self.runs.get(request)

    async def ListRuns(self, request, context):
        return await self.runs.list_page(request)

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
        await self.streams.send(context, self.experience.lease(request, context))

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
        await self.streams.show(context, self.members.watch(request))

    async def StartEvaluation(self, request, context):
        return await self.evaluations.start(request)

    async def GetEvaluation(self, request, context):
        return await self.evaluations.get(request, context)

    async def CollectResults(self, request, context):
        await self.streams.send(context, self.results.collect(request))

    async def ReportProgress(self, request, context):
        return await self.events.report(request)

    async def WatchRun(self, request, context):
        await self.streams.show(context, self.events.watch(request))

    async def ListDead(self, request, context):
        return await self.dead_letters.list_dead(request)

    async def RequeueDead(self, request, context):
        return await self.dead_letters.requeue(request)

    async def GetGroup(self, request, context):
        return await self.history.get(request)

    async def AuditRun(self, request, context):
        await self.streams.show(context, self.audit.run(request))


def add_to(host: ServiceHost, servicer: BrokerServicer) -> None:
    """Register the servicer with a host's server."""
    broker_pb2_grpc.add_BrokerServiceServicer_to_server(servicer, host.server)
    # Replaces the handler just added: these requests are sliced, not parsed.
    host.server.add_registered_method_handlers(SERVICE, {"PutExperience": put_handler(servicer.PutExperience)})
    host.limit_requests({f"/{SERVICE}/{method}": most for method, most in validation.REQUEST_BYTES.items()})
