"""The attacks: the requests that each makes, and the allowed status codes of the responses.

tests/contract covers single invalid calls; these attacks repeat, accumulate, or reach an engine.

No attack allows INTERNAL or UNKNOWN, which blame the service. OK is allowed if the request may be accepted and then
affects only its own prompt, group or run.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from quartet.v1 import broker_pb2 as broker
from quartet.v1 import common_pb2, experience_pb2, reward_pb2

from quartet_contract.calls import OWNERS, Caller, method_of
from quartet_contract.target import group_tensors
from quartet_contract.world import SERVE, TRAIN, instance, put_group

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "contract"), str(TESTS / "hostile")]
from answers import ANSWERS  # noqa: E402
from hostile_connections import idle_connections  # noqa: E402

SECONDS = 60.0  # timeout of a call
HELD_SECONDS = 2.0  # duration of idle connections and streams
MEBI = 1 << 20
HUGE = (2**53, 2**62, 2**63 - 1, -1, -(2**63))
NOBODY = "127.0.0.1:1"

INVALID, EXHAUSTED = "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"
PRECONDITION, ABORTED = "FAILED_PRECONDITION", "ABORTED"
CLOSED = "closed"  # a connection that the service or the attacker closed


@dataclass
class Attacker:
    """An attacker with network access and every role.

    Attributes:
        run_id: the attacked run.
        own_run: a run of the attacker's own, which exists.
        addresses: host:port by kind of service.
    """

    run_id: str
    own_run: str
    addresses: dict[str, str]
    chance: random.Random
    callers: dict[str, Caller] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.callers = {OWNERS[kind]: Caller(address) for kind, address in self.addresses.items()}

    def close(self) -> None:
        """Close the channels."""
        for caller in self.callers.values():
            caller.close()

    def name(self) -> str:
        """Return an unused name."""
        return f"attack-{self.chance.getrandbits(64):x}"

    def ask(self, rpc: str, request: Message) -> Message:
        """Make a call. Raises RpcError."""
        return self.callers[rpc.partition(".")[0]].call(rpc, request, timeout=SECONDS)

    def send(self, rpc: str, **fields: object) -> str:
        """Make a call with these fields; return the status code."""
        return self.code(rpc, GetMessageClass(method_of(rpc).input_type)(**fields))

    def code(self, rpc: str, request: Message | bytes) -> str:
        """Make a call with a message or arbitrary bytes; return the status code, of a stream the first response's."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        error = self.callers[rpc.partition(".")[0]].raw(rpc, data, SECONDS)
        return error.code().name if error else "OK"


Act = Callable[[Attacker], Iterator[str]]


@dataclass(frozen=True)
class Attack:
    """One kind of attack. `act` makes it once and yields the status codes; `allowed` are the allowed ones."""

    name: str
    allowed: frozenset[str]
    act: Act


ATTACKS: list[Attack] = []


def attack(name: str, *allowed: str) -> Callable[[Act], Act]:
    """Add a function to ATTACKS."""

    def enter(act: Act) -> Act:
        ATTACKS.append(Attack(name, frozenset(allowed), act))
        return act

    return enter


# One item


def _submit(
    attacker: Attacker, run_id: str, *instances: experience_pb2.PromptInstance, evaluation_set: str = ""
) -> str:
    return attacker.send(
        "BrokerService.SubmitPrompts", run_id=run_id, instances=instances, evaluation_set=evaluation_set
    )


@attack("prompts that cannot be generated or judged", "OK", EXHAUSTED)
def _poison_prompts(attacker: Attacker) -> Iterator[str]:
    cases = {
        "no such verifier": {"verifiers": [{"name": "no-such"}]},
        "parameters nobody has": {"verifiers": [{"name": "think_answer_tags", "parameters": {"no_such_key": [1, 2]}}]},
        "control characters": {"text": "\x1b]0;owned\x07\x1b[2J\n\u202e\U000e0001" * 20},
        "too long": {"text": "<|im_end|>" * 5000},
        "a reference that is no number": {"reference": reward_pb2.Reference(answer="9^9^9^9^9")},
    }
    fields = attacker.chance.choice(list(cases.values()))
    prompt = experience_pb2.Prompt(**{"prompt_id": "p", "text": "1+1=?"} | fields)
    purpose = attacker.chance.choice((TRAIN, SERVE))
    one = experience_pb2.PromptInstance(instance_id=attacker.name(), prompt=prompt, purpose=purpose)
    yield _submit(attacker, attacker.run_id, one)


# One group


def _bad_tensors(chance: random.Random) -> bytes:
    tensors = group_tensors()
    match chance.randrange(7):
        case 0:
            return chance.randbytes(300)
        case 1:
            return b""
        case 2:
            tensors.rewards.dtype = 9
        case 3:
            tensors.rewards.shape[0] = 1 << 40
        case 4:
            tensors.completion_token_ids.data = b"\xff\xff\xff\x7f" * 6
        case 5:
            tensors.rewards.data = b"\x00\x00\xc0\x7f" * 2
        case 6:
            tensors.completion_token_ids.lengths[:] = [2**31 - 1, 2**31 - 1]
    return tensors.SerializeToString()


@attack("groups of garbage, of wrong types, shapes, ids, NaN", "OK", EXHAUSTED)
def _bad_groups(attacker: Attacker) -> Iterator[str]:
    me = broker.Member(
        instance_id=attacker.name(),
        kind=common_pb2.SERVICE_KIND_ROLLOUT,
        address=NOBODY,
        state=broker.MEMBER_STATE_JOINING,
    )
    yield attacker.send("BrokerService.RegisterMember", run_id=attacker.run_id, member=me)
    run = attacker.ask("BrokerService.GetRun", broker.GetRunRequest(run_id=attacker.run_id)).run
    lease = broker.LeasePromptsRequest(
        run_id=attacker.run_id, holder=me.instance_id, max_prompts=1, policy_version=run.policy_version
    )
    with suppress(grpc.RpcError):  # the run's end
        for granted in attacker.ask("BrokerService.LeasePrompts", lease).leases:
            group = put_group(granted, run.policy_version, _bad_tensors(attacker.chance))
            yield attacker.send("BrokerService.PutExperience", run_id=attacker.run_id, groups=[group])
    yield attacker.send("BrokerService.LeaveMember", run_id=attacker.run_id, instance_id=me.instance_id)


# Sizes


@attack("events up to their limit, one after the other", "OK")
def _many_events(attacker: Attacker) -> Iterator[str]:
    event = broker.RunEvent(notice=broker.Notice(level="info", text="\x1b[2J" * 50_000, source="attacker"))
    for _ in range(4):
        yield attacker.send("BrokerService.ReportProgress", run_id=attacker.own_run, event=event)


@attack("more members than a run may have", "OK", EXHAUSTED)
def _many_members(attacker: Attacker) -> Iterator[str]:
    for _ in range(20):
        member = broker.Member(
            instance_id=attacker.name(), kind=common_pb2.SERVICE_KIND_ROLLOUT, address=NOBODY, waiting_for="x" * 3500
        )
        yield attacker.send("BrokerService.RegisterMember", run_id=attacker.own_run, member=member)


@attack("prompts until none is taken", "OK", EXHAUSTED)
def _many_prompts(attacker: Attacker) -> Iterator[str]:
    fill = instance(attacker.name(), "x" * (6 * MEBI))
    yield _submit(attacker, attacker.own_run, fill)
    kept = experience_pb2.PURPOSE_EVALUATE
    yield _submit(attacker, attacker.own_run, instance(attacker.name(), "x" * MEBI, kept), evaluation_set="kept")


@attack("messages over the limit", EXHAUSTED)
def _large_message(attacker: Attacker) -> Iterator[str]:
    rpc = attacker.chance.choice(("BrokerService.SubmitPrompts", "RewardService.Score", "RolloutService.Generate"))
    yield attacker.code(rpc, b"\x12" + bytes(64 * MEBI + 1000))


@attack("runs made and deleted, with specifications too large", "OK", INVALID, EXHAUSTED)
def _runs(attacker: Attacker) -> Iterator[str]:
    name = attacker.name()
    for text in ("x" * 1000, "x" * MEBI):
        spec = broker.RunSpec(run_id=name, groups_per_step=2, group_size=2, system_prompt=text)
        yield attacker.send("BrokerService.CreateRun", spec=spec)
    yield attacker.send("BrokerService.ListRuns", limit=2**31 - 1, page_token="\0" * 9999)
    yield attacker.send("BrokerService.DeleteRun", run_id=name, force=True)


@attack("watchers that do not read", "OK", EXHAUSTED, CLOSED)
def _silent_watchers(attacker: Attacker) -> Iterator[str]:
    caller, method = attacker.callers["BrokerService"], method_of("BrokerService.WatchRun")
    call = caller.callable(method, lambda message: message.SerializeToString())
    requests = [broker.WatchRunRequest(run_id=name) for name in (attacker.own_run, attacker.run_id)]
    streams = [call(requests[number % 2], timeout=SECONDS) for number in range(50)]
    time.sleep(HELD_SECONDS)
    for stream in streams:
        stream.cancel()
    for stream in streams:
        code = stream.code()
        yield CLOSED if code is grpc.StatusCode.CANCELLED else code.name


# Numbers


@attack("weight groups and updates of numbers that no trainer has", INVALID, PRECONDITION, ABORTED)
def _numbers(attacker: Attacker) -> Iterator[str]:
    huge = attacker.chance.choice(HUGE)
    group = {"transport": 1, "store_host": "h\nx", "store_port": 1, "rank": 1, "world_size": 2}
    update = {"policy_version": huge}
    rpc, fields = attacker.chance.choice(
        [("JoinWeightGroup", group), ("BeginWeightUpdate", update), ("FinishWeightUpdate", update)]
    )
    yield attacker.send(f"RolloutService.{rpc}", run_id=attacker.run_id, group_epoch=huge, **fields)


@attack("generations that no engine can make", INVALID)
def _generations(attacker: Attacker) -> Iterator[str]:
    bad = ({"n": 2**31 - 1}, {"temperature": float("nan")}, {"top_p": float("inf")}, {"max_new_tokens": -1}, {"n": -1})
    sampling = {"n": 1, "max_new_tokens": 4} | attacker.chance.choice(bad)
    prompt = experience_pb2.Prompt(prompt_id="p", text="1+1=?", sampling=sampling)
    rpc = attacker.chance.choice(("Generate", "GenerateStream"))
    yield attacker.send(f"RolloutService.{rpc}", prompt=prompt)
    too_long = experience_pb2.Prompt(prompt_id="p", text="<|im_end|>" * 100_000)
    yield attacker.send("RolloutService.Generate", prompt=too_long)


# Texts


@attack("hostile answers to be verified", "OK", EXHAUSTED)
def _hostile_answers(attacker: Attacker) -> Iterator[str]:
    items = [
        reward_pb2.ScoreItem(
            item_id=str(number),
            completion=hostile.completion,
            reference=reward_pb2.Reference(answer=hostile.reference),
            verifiers=[reward_pb2.VerifierSpec(name="math")],
        )
        for number, hostile in enumerate(attacker.chance.sample(ANSWERS, 3))
    ]
    yield attacker.send("RewardService.Score", items=items)


@attack("long texts and floods of special tokens to be verified", "OK", EXHAUSTED)
def _long_texts(attacker: Attacker) -> Iterator[str]:
    size = attacker.chance.choice((MEBI, 10 * MEBI))
    flood = attacker.chance.choice(("z", "<|im_end|>", "<answer>", r"\boxed{", "{", "$", "</think>", "1+", "\n"))
    tags = {"name": "think_answer_tags"} | ({"parameters": {"special_tokens": ["z"]}} if flood == "z" else {})
    item = reward_pb2.ScoreItem(
        item_id="a",
        completion=flood * (size // len(flood)),
        reference=reward_pb2.Reference(answer="1"),
        verifiers=[tags, {"name": attacker.chance.choice(("exact", "boxed", "math"))}],
    )
    yield attacker.send("RewardService.Score", items=[item])


# Connections


@attack("connections that are left half open", CLOSED)
def _half_open(attacker: Attacker) -> Iterator[str]:
    with idle_connections(attacker.chance.choice(list(attacker.addresses.values())), 100):
        time.sleep(HELD_SECONDS)
    yield CLOSED
