"""What a case is written in: the servers, a name of its own, and a run at the broker, arranged by calls alone."""

import itertools
import secrets
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from google.protobuf.message import Message
from quartet.v1 import broker_pb2 as pb
from quartet.v1 import common_pb2, experience_pb2

from quartet_common.durations import to_duration
from quartet_contract.calls import SECONDS, Caller

_SERIAL = itertools.count(1)


class NotHere(Exception):
    """The case needs what these servers do not have; the text is one sentence about it."""


class World:
    """One case's view of the servers under test."""

    def __init__(self, callers: dict[str, Caller], weights: Any = None, context: int = 256, end_token: int = 0):
        """`callers` by service ("BrokerService") or by the name of a special server ("idle trainer").

        `weights`: the trainer's side of weight updates to the rollout, as tests/contract/weight_arrangements.py has it,
        or target.NoWeightSide. `context`, `end_token`: of the rollout's model; those of the demo's.
        """
        self._callers = callers
        self._weights = weights
        self.name = f"case-{next(_SERIAL)}-{secrets.token_hex(3)}"
        """Unique: a run id, an instance id, …"""
        self.context, self.end_token = context, end_token
        self.kept = SimpleNamespace()
        """What building the request leaves for checking the answer."""

    def call(
        self, rpc: str, request: Message | Sequence[Message], server: str = "", take: int = 0, timeout: float = SECONDS
    ):
        """Call an RPC of the usual server of its service, or of another one."""
        return self._callers[server or rpc.partition(".")[0]].call(rpc, request, take, timeout)

    def run(self, **spec) -> "BrokerRun":
        """Return a run of this case's own, made now, with one registered rollout "r1"; `spec`: fields of RunSpec."""
        return BrokerRun(self, self.name, **spec)

    @property
    def weights(self) -> Any:
        """The trainer's side of weight updates to the rollout under test."""
        assert self._weights is not None, "this case does not call a rollout"
        return self._weights


TRAIN, EVALUATE, SERVE = experience_pb2.PURPOSE_TRAIN, experience_pb2.PURPOSE_EVALUATE, experience_pb2.PURPOSE_SERVE


def instance(name: str, text: str = "1+1=?", purpose: int = TRAIN, **fields) -> experience_pb2.PromptInstance:
    """Return a prompt instance."""
    prompt = experience_pb2.Prompt(prompt_id=name, text=text)
    return experience_pb2.PromptInstance(instance_id=name, prompt=prompt, purpose=purpose, **fields)


def rollout(name: str = "r1", **fields) -> pb.Member:
    """Return a member that is a rollout."""
    fields = {"address": "127.0.0.1:1", "state": pb.MEMBER_STATE_ACTIVE} | fields
    return pb.Member(**{"instance_id": name, "kind": common_pb2.SERVICE_KIND_ROLLOUT} | fields)


def put_group(lease: pb.PromptLease, version: int = 0, tensors: bytes = b"opaque") -> pb.PutGroup:
    """Return a finished group that answers a lease."""
    header = experience_pb2.GroupHeader(
        instance_id=lease.instance.instance_id,
        purpose=lease.instance.purpose,
        min_policy_version=version,
        max_policy_version=version,
        completions=2,
        completion_tokens=6,
        attempt=lease.attempt,
        reward_mean=0.5,
        reward_std=0.7,
    )
    transcript = experience_pb2.GroupTranscript(instance=lease.instance, prompt_text="1+1=?", rollout_id="r1")
    group = experience_pb2.ExperienceGroup(header=header, tensors=tensors, transcript=transcript.SerializeToString())
    return pb.PutGroup(lease_id=lease.lease_id, group=group)


class BrokerRun:
    """A run with two groups a step and no staleness, unless said otherwise; its methods are the broker's RPCs."""

    def __init__(self, world: "World", run_id: str, **spec):
        self._world, self.id, self.session = world, run_id, 0
        spec = {"run_id": run_id, "groups_per_step": 2, "max_staleness": 0, "group_size": 2} | spec
        self.call("CreateRun", pb.CreateRunRequest(spec=pb.RunSpec(**spec)))
        self.call("RegisterMember", pb.RegisterMemberRequest(run_id=run_id, member=rollout()))

    def call(self, rpc: str, request):
        """Call the broker."""
        return self._world.call(f"BrokerService.{rpc}", request)

    def submit(self, *names: str, purpose: int = TRAIN, evaluation_set: str = "") -> "BrokerRun":
        """Queue prompts."""
        instances = [instance(name, purpose=purpose) for name in names]
        request = pb.SubmitPromptsRequest(run_id=self.id, instances=instances, evaluation_set=evaluation_set)
        self.call("SubmitPrompts", request)
        return self

    def lease(self, count: int = 100, version: int = 0) -> list[pb.PromptLease]:
        """Lease prompts as the rollout "r1"."""
        request = pb.LeasePromptsRequest(run_id=self.id, holder="r1", max_prompts=count, policy_version=version)
        return list(self.call("LeasePrompts", request).leases)

    def put(self, leases: list[pb.PromptLease], version: int = 0, tensors: bytes = b"opaque") -> None:
        """Answer leases."""
        groups = [put_group(lease, version, tensors) for lease in leases]
        outcomes = self.call("PutExperience", pb.PutExperienceRequest(run_id=self.id, groups=groups)).outcomes
        assert list(outcomes) == [pb.PUT_OUTCOME_ACCEPTED] * len(leases)

    def ready(self, *names: str) -> "BrokerRun":
        """Have groups of these prompts ready for the trainer."""
        self.put(self.submit(*names).lease(len(names)))
        return self

    def open(self, **fields) -> "BrokerRun":
        """Open a trainer's session; `session` is its epoch."""
        request = pb.OpenSessionRequest(run_id=self.id, holder="t1", **fields)
        self.session = self.call("OpenSession", request).session_epoch
        return self

    def take(self, step: int = 0) -> "BrokerRun":
        """Lease the batch of a step; it must be granted."""
        request = pb.LeaseExperienceRequest(run_id=self.id, session_epoch=self.session, step=step)
        assert self.call("LeaseExperience", request)[0].manifest.granted
        return self

    def granted(self) -> "BrokerRun":
        """Have a batch of "a" and "b" granted for step 0."""
        return self.ready("a", "b").open().take(0)

    def trained(self) -> "BrokerRun":
        """Have step 0 trained."""
        request = pb.MarkTrainedRequest(run_id=self.granted().id, session_epoch=self.session, step=0)
        self.call("MarkTrained", request)
        return self

    def committed(self) -> "BrokerRun":
        """Have step 0 trained and durable."""
        request = pb.CommitRequest(run_id=self.trained().id, session_epoch=self.session, step=1)
        assert self.call("Commit", request).committed == 2
        return self

    def dead(self, name: str, unscored: bytes = b"") -> "BrokerRun":
        """Have a prompt set aside, with completions that are to be scored or without."""
        (lease,) = self.submit(name).lease(1)
        release = pb.LeaseRelease(lease_id=lease.lease_id, failure="prompt too long", permanent=True, unscored=unscored)
        assert self.call("ReleaseLeases", pb.ReleaseLeasesRequest(run_id=self.id, releases=[release])).dead == 1
        return self

    def evaluation(self, finished: bool = False) -> "BrokerRun":
        """Have the set "heldout" of one prompt stored and its evaluation at version 0 started, and answered too."""
        self.submit("e1", purpose=EVALUATE, evaluation_set="heldout")
        self.call(
            "StartEvaluation", pb.StartEvaluationRequest(run_id=self.id, evaluation_set="heldout", policy_version=0)
        )
        if finished:
            self.put(self.lease(1))
        return self

    def end(self) -> "BrokerRun":
        """Say that no more training prompts come."""
        self.call("EndPrompts", pb.EndPromptsRequest(run_id=self.id))
        return self

    def finish(self, state: int = pb.RUN_STATE_SUCCEEDED) -> "BrokerRun":
        """End the run."""
        self.call("FinishRun", pb.FinishRunRequest(run_id=self.id, state=state, reason="enough"))
        return self

    def now(self) -> pb.Run:
        """Return the run as it stands."""
        return self.call("GetRun", pb.GetRunRequest(run_id=self.id)).run

    def wait(self, seconds: float, holder: str = "r1") -> pb.LeasePromptsRequest:
        """Return a request for prompts that waits."""
        return pb.LeasePromptsRequest(run_id=self.id, holder=holder, max_prompts=1, wait=to_duration(seconds))
