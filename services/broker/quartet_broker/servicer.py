"""BrokerService: forwards each RPC to the part that implements it."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2

from quartet_broker import validation
from quartet_broker.audit import Audit
from quartet_broker.config import BrokerSection
from quartet_broker.events import Events
from quartet_broker.experience import Experience
from quartet_broker.experience_codec import put_handler
from quartet_broker.members import Members
from quartet_broker.notifier import Notifier
from quartet_broker.prompts import Evaluations, Prompts
from quartet_broker.results import DeadLetters, History, Results
from quartet_broker.runs import Runs, state_value
from quartet_broker.servers import Servers, connect
from quartet_broker.sessions import Sessions
from quartet_broker.store import Store
from quartet_broker.streams import Streams
from quartet_common.host import ServiceHost

# gRPC names methods in CamelCase.
# ruff: noqa: N802

_WATCHERS_CONNECTIONS = 16
SERVICE = broker_pb2.DESCRIPTOR.services_by_name["BrokerService"].full_name


def _unary(method: Callable[["BrokerServicer"], Callable[..., Awaitable[Any]]], with_context: bool = False) -> Any:
    async def answer(self: "BrokerServicer", request: Any, context: grpc.aio.ServicerContext) -> Any:
        return await (method(self)(request, context) if with_context else method(self)(request))

    return answer


def _stream(
    method: Callable[["BrokerServicer"], Callable[..., AsyncGenerator[Any]]],
    watched: bool = False,
    with_context: bool = False,
) -> Any:
    async def answer(self: "BrokerServicer", request: Any, context: grpc.aio.ServicerContext) -> None:
        answers = method(self)(request, context) if with_context else method(self)(request)
        await (self.streams.show if watched else self.streams.send)(context, answers)

    return answer


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

    CreateRun = _unary(lambda self: self.runs.create)
    GetRun = _unary(lambda self: self.runs.get)
    ListRuns = _unary(lambda self: self.runs.list_page)
    FinishRun = _unary(lambda self: self.runs.finish)
    DeleteRun = _unary(lambda self: self.runs.delete)
    SubmitPrompts = _unary(lambda self: self.prompts.submit)
    EndPrompts = _unary(lambda self: self.prompts.end)
    LeasePrompts = _unary(lambda self: self.prompts.lease, with_context=True)
    RenewLeases = _unary(lambda self: self.prompts.renew)
    ReleaseLeases = _unary(lambda self: self.prompts.release)
    GetUnscored = _unary(lambda self: self.prompts.unscored)
    PutExperience = _unary(lambda self: self.experience.put)
    OpenSession = _unary(lambda self: self.sessions.open)
    SettleTrained = _unary(lambda self: self.sessions.settle_trained)
    LeaseExperience = _stream(lambda self: self.experience.lease, with_context=True)
    DropExperience = _unary(lambda self: self.experience.drop)
    MarkTrained = _unary(lambda self: self.sessions.mark_trained)
    Commit = _unary(lambda self: self.sessions.commit)

    async def RegisterMember(self, request, context):
        epoch = await self.members.register(request.run_id, request.member)
        return broker_pb2.RegisterMemberResponse(group_epoch=epoch, run=await self.runs.load(request.run_id))

    async def Heartbeat(self, request, context):
        epoch, state, version = await self.members.heartbeat(request)
        return broker_pb2.HeartbeatResponse(group_epoch=epoch, run_state=state_value(state), policy_version=version)

    LeaveMember = _unary(lambda self: self.members.leave)
    WatchMembers = _stream(lambda self: self.members.watch, watched=True)
    StartEvaluation = _unary(lambda self: self.evaluations.start)
    GetEvaluation = _unary(lambda self: self.evaluations.get, with_context=True)
    CollectResults = _stream(lambda self: self.results.collect)
    ReportProgress = _unary(lambda self: self.events.report)
    WatchRun = _stream(lambda self: self.events.watch, watched=True)
    ListDead = _unary(lambda self: self.dead_letters.list_dead)
    RequeueDead = _unary(lambda self: self.dead_letters.requeue)
    GetGroup = _unary(lambda self: self.history.get)
    AuditRun = _stream(lambda self: self.audit.run, watched=True)


def add_to(host: ServiceHost, servicer: BrokerServicer) -> None:
    """Register the servicer with a host's server."""
    broker_pb2_grpc.add_BrokerServiceServicer_to_server(servicer, host.server)
    # Replaces the handler just added: these requests are sliced, not parsed.
    host.server.add_registered_method_handlers(SERVICE, {"PutExperience": put_handler(servicer.PutExperience)})
    host.limit_requests({f"/{SERVICE}/{method}": most for method, most in validation.REQUEST_BYTES.items()})
