"""A broker for unit tests of the trainer: real gRPC, state in memory, and knobs for what goes wrong.

The real broker has its own tests; tests/integration runs both together.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import learner_helpers
import numpy as np
from quartet.v1 import broker_pb2, broker_pb2_grpc, common_pb2, common_pb2_grpc, experience_pb2, reward_pb2

from quartet_common.durations import to_duration


def make_group(
    instance_id: str, version: int, seed: int = 0, completions: int = 4, flat: bool = False
) -> experience_pb2.ExperienceGroup:
    """A group of short random completions, every second one right; all of them if it is `flat`."""
    right = [float(flat or index % 2) for index in range(completions)]
    rng, lengths = np.random.default_rng(seed), range(3, 3 + completions)
    tensors = learner_helpers.make_group(rng, lengths, rewards=right, temperature=1.0, version=version)
    header = experience_pb2.GroupHeader(
        instance_id=instance_id,
        purpose=experience_pb2.PURPOSE_TRAIN,
        min_policy_version=version,
        max_policy_version=version,
        completions=completions,
        reward_mean=0.5,
        attempt=1,
    )
    transcript = make_transcript(instance_id, version, right)
    return experience_pb2.ExperienceGroup(
        header=header, tensors=tensors.SerializeToString(), transcript=transcript.SerializeToString()
    )


def make_transcript(instance_id: str, version: int, right: list[float]) -> experience_pb2.GroupTranscript:
    """The readable side of a group."""
    return experience_pb2.GroupTranscript(
        instance=experience_pb2.PromptInstance(
            instance_id=instance_id,
            prompt=experience_pb2.Prompt(prompt_id="p", reference=reward_pb2.Reference(answer="8")),
        ),
        prompt_text="2+3=?",
        completions=[
            experience_pb2.CompletionInfo(
                index=index,
                text=f"answer {index}",
                finish_reason=experience_pb2.FINISH_REASON_STOP,
                version_spans=[experience_pb2.VersionSpan(policy_version=version, begin=0, end=3)],
                score=reward_pb2.Score(reward=value, ans_acc=value, format_acc=1, outcome=1 if value else 2),
                tokens=3,
            )
            for index, value in enumerate(right)
        ],
    )


def evaluated(instance_id: str) -> bytes:
    """The transcript of an instance "0@VERSION", which is wrong, or "1@VERSION", which is right."""
    right, _, version = instance_id.partition("@")
    return make_transcript(instance_id, int(version), [float(right)]).SerializeToString()


class FakeBroker(broker_pb2_grpc.BrokerServiceServicer, common_pb2_grpc.HandshakeServiceServicer):
    """One run, 'test'. Tests set the attributes and read what the trainer did."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.run = broker_pb2.Run(
            spec=broker_pb2.RunSpec(run_id="test", groups_per_step=2, max_steps=3, member_ttl=to_duration(15)),
            state=broker_pb2.RUN_STATE_ACTIVE,
        )
        self.run.created_at.FromSeconds(1_700_000_000)
        self.members: dict[str, broker_pb2.Member] = {}
        self.left: list[str] = []  # instance ids of members
        self.epoch = 0
        self.session_epoch = 0
        self.opened: list[broker_pb2.OpenSessionRequest] = []
        self.settle_from: int | None = None  # None: a broker of before, which takes no ledger
        self.ledger_digest = ""
        self.settled: list[tuple[int, list[str]]] = []
        self.trained: list[int] = []
        self.committed: list[int] = []
        self.dropped: list[str] = []
        self.drop_reasons: dict[str, str] = {}  # by instance
        self.batches: dict[int, list[str]] = {}
        self.granted: set[int] = set()
        self.flat: set[str] = set()
        self.contents: dict[str, experience_pb2.ExperienceGroup] = {}  # of instances that have no random group
        self.rollouts: dict[str, str] = {}  # who put an instance, if not "rollout-1"
        self.spare: list[str] = []
        self.events: list[broker_pb2.RunEvent] = []
        self.finished: list[broker_pb2.FinishRunRequest] = []
        self.evaluations: list[tuple[str, int]] = []
        self.evaluation_complete = threading.Event()
        self.evaluation_complete.set()
        self.evaluation_trouble = ""  # "large": its transcripts fit no message; "deleted": one is gone
        self.batches_allowed = 10**9
        self.end_of_data = False
        self.away = False
        self.away_as = grpc.StatusCode.UNAVAILABLE
        self._server = grpc.server(ThreadPoolExecutor(32))
        broker_pb2_grpc.add_BrokerServiceServicer_to_server(self, self._server)
        common_pb2_grpc.add_HandshakeServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def close(self) -> None:
        with self.changed:
            self.away = True
            self.changed.notify_all()
        self._server.stop(grace=0).wait()

    def change(self, **values: object) -> None:
        """Set attributes and wake those who wait."""
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def add_member(self, member: broker_pb2.Member) -> None:
        self.change(members={**self.members, member.instance_id: member}, epoch=self.epoch + 1)

    def remove_member(self, name: str) -> None:
        members = {key: member for key, member in self.members.items() if key != name}
        self.change(members=members, epoch=self.epoch + 1)

    def wait_until(self, condition, seconds: float = 60.0) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), "did not happen in time"

    def _add(self, name: str, added: object) -> None:
        """Add to a list and wake those who wait."""
        with self.changed:
            getattr(self, name).append(added)
            self.changed.notify_all()

    def _check(self, context, session_epoch: int | None = None) -> None:
        if self.away:
            context.abort(self.away_as, "Redis is away")
        if session_epoch is not None and session_epoch != self.session_epoch:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "session 1 was fenced by session 2 of another trainer")

    def Handshake(self, request, context):
        return common_pb2.HandshakeResponse(service=common_pb2.SERVICE_KIND_BROKER)

    def GetRun(self, request, context):
        self._check(context)
        return broker_pb2.GetRunResponse(run=self.run)

    def OpenSession(self, request, context):
        self._check(context)
        self.session_epoch += 1
        self._add("opened", request)
        return broker_pb2.OpenSessionResponse(
            session_epoch=self.session_epoch,
            run=self.run,
            settle_from_step=self.settle_from,
            ledger_digest=self.ledger_digest,
        )

    def SettleTrained(self, request, context):
        self._check(context, request.session_epoch)
        for line in request.steps:
            self.settled.append((line.step, list(line.instance_ids)))
        return broker_pb2.SettleTrainedResponse(settled_steps=self.settled[-1][0] + 1)

    def LeaseExperience(self, request, context):
        self._check(context, request.session_epoch)
        with self.changed:
            self.changed.wait_for(
                lambda: (
                    self.away
                    or not context.is_active()
                    or request.session_epoch != self.session_epoch
                    or self._ready(request.step)
                ),
                request.wait.seconds,
            )
        self._check(context, request.session_epoch)
        manifest = broker_pb2.BatchManifest(needed=2)
        if self.run.state != broker_pb2.RUN_STATE_ACTIVE:
            manifest.run_finished = True
        elif request.step < self.batches_allowed and self._can_fill(request.step):
            manifest.granted = True
            manifest.replayed = request.step in self.granted
            manifest.end_of_data = self.end_of_data and request.step + 1 == self.batches_allowed
            manifest.instance_ids.extend(self._batch(request.step))
            self.change(granted=self.granted | {request.step})
        elif self.end_of_data:
            manifest.end_of_data = True
        yield broker_pb2.LeaseExperienceResponse(manifest=manifest)
        for seed, name in enumerate(manifest.instance_ids):
            group = self.contents.get(name) or make_group(name, max(0, request.step - 1), seed, flat=name in self.flat)
            yield broker_pb2.LeaseExperienceResponse(group=group)

    def _can_fill(self, step: int) -> bool:
        return step not in self.batches or len(self.batches[step]) + len(self.spare) >= 2

    def _batch(self, step: int) -> list[str]:
        batch = self.batches.setdefault(step, [f"pass-0/{2 * step + i}" for i in range(2)])
        while len(batch) < 2 and self.spare:
            batch.append(self.spare.pop(0))
        return batch

    def _ready(self, step: int) -> bool:
        if step < self.batches_allowed and self._can_fill(step):
            return True
        return self.end_of_data or self.run.state != broker_pb2.RUN_STATE_ACTIVE

    def DropExperience(self, request, context):
        self._check(context, request.session_epoch)
        for name in request.instance_ids:
            self.drop_reasons[name] = request.reason
            self.batches[request.step].remove(name)
            self._add("dropped", name)
        self.granted.discard(request.step)
        return broker_pb2.DropExperienceResponse(dropped=len(request.instance_ids))

    def GetGroup(self, request, context):
        self._check(context, self.session_epoch)
        put = broker_pb2.GroupMoment(
            kind=broker_pb2.GROUP_MOMENT_KIND_PUT, who=self.rollouts.get(request.instance_id, "rollout-1")
        )
        return broker_pb2.GetGroupResponse(moments=[put])

    def MarkTrained(self, request, context):
        self._check(context, request.session_epoch)
        assert list(request.instance_ids) == self.batches[request.step]
        self._add("trained", request.step)
        self.run.policy_version = request.step + 1
        return broker_pb2.MarkTrainedResponse(policy_version=request.step + 1)

    def Commit(self, request, context):
        self._check(context, request.session_epoch)
        self._add("committed", request.step)
        return broker_pb2.CommitResponse()

    def FinishRun(self, request, context):
        self._check(context)
        self.finished.append(request)
        self.run.state = request.state
        return broker_pb2.FinishRunResponse(run=self.run)

    def RegisterMember(self, request, context):
        self._check(context)
        return broker_pb2.RegisterMemberResponse(group_epoch=self.epoch, run=self.run)

    def Heartbeat(self, request, context):
        self._check(context)
        return broker_pb2.HeartbeatResponse(group_epoch=self.epoch, run_state=self.run.state)

    def LeaveMember(self, request, context):
        self._add("left", request.instance_id)
        return broker_pb2.LeaveMemberResponse(group_epoch=self.epoch)

    def WatchMembers(self, request, context):
        seen = None
        context.add_callback(lambda: self.change())
        while context.is_active() and not self.away:
            with self.changed:
                if self.epoch == seen:
                    self.changed.wait(5)
                    continue
                seen = self.epoch
                answer = broker_pb2.WatchMembersResponse(group_epoch=seen, members=list(self.members.values()))
            yield answer

    def StartEvaluation(self, request, context):
        self._check(context)
        if self.run.state != broker_pb2.RUN_STATE_ACTIVE:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "run 'test': it is finished")
        self._add("evaluations", (request.evaluation_set, request.policy_version))
        name = f"{request.evaluation_set}@{request.policy_version}"
        return broker_pb2.StartEvaluationResponse(evaluation_id=name, prompts=2)

    def GetEvaluation(self, request, context):
        self._check(context)
        complete = self.evaluation_complete.wait(min(0.2, request.wait.seconds))
        version = request.evaluation_id.partition("@")[2]
        answer = broker_pb2.GetEvaluationResponse(complete=complete, prompts=2, finished=2 * complete)
        names = [f"{right}@{version}" for right in range(2)]
        answer.headers.extend(experience_pb2.GroupHeader(instance_id=name) for name in names)
        if complete and not request.summary_only:
            if "large" in self.evaluation_trouble:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "its transcripts have 99999999 bytes")
            answer.transcripts.extend(map(evaluated, names))
            if "deleted" in self.evaluation_trouble:
                answer.transcripts[0] = b""
        return answer

    def CollectResults(self, request, context):
        if "deleted" in self.evaluation_trouble:
            context.abort(grpc.StatusCode.NOT_FOUND, "it was let go")
        for name in request.instance_ids:
            yield broker_pb2.CollectResultsResponse(instance_id=name, transcript=evaluated(name))

    def ReportProgress(self, request, context):
        self._check(context)
        self._add("events", request.event)
        return broker_pb2.ReportProgressResponse(event_id=str(len(self.events)))
