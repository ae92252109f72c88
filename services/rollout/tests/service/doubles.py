"""What stands around the parts under test: a deterministic engine, and a broker and a reward service that speak real
gRPC on real sockets and keep their state in memory.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
from quartet.v1 import broker_pb2, broker_pb2_grpc, experience_pb2, reward_pb2, reward_pb2_grpc

from quartet_common.config import SecuritySection, ServerSection
from quartet_common.durations import now_timestamp, to_duration, to_seconds
from quartet_common.errors import failed_precondition, not_found, resource_exhausted, unavailable
from quartet_rollout.engines.base import (
    UNKNOWN_VERSION,
    EngineCompletion,
    EngineStats,
    SamplingMask,
    SamplingSettings,
    WeightGroupInfo,
    check_prompt,
    version_spans,
)
from quartet_rollout.state import Changes
from quartet_server.host import ServiceHost


class CharTokenizer:
    """One token per character: its code point."""

    def encode(self, text: str, add_special_tokens: bool, split_special_tokens: bool = False) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def get_vocab(self) -> dict[str, int]:
        return {chr(code): code for code in range(128)}

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert not skip_special_tokens and not clean_up_tokenization_spaces
        return "".join(chr(token) for token in ids)

    def apply_chat_template(
        self,
        messages: list[dict],
        tokenize: bool,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        assert not tokenize and add_generation_prompt != continue_final_message
        if messages[-1]["role"] == "developer":
            raise ValueError("the last turn must be the user's")
        text = "".join(f"[{message['role']}]{message['content']}" for message in messages)
        return text + "[assistant]" * add_generation_prompt


class ScriptedEngine:
    """Completion i of a prompt is `length + grows * i` times the letter 'a' + i, a token every `step` seconds.

    After `hold(k)` no completion gets more than k tokens until `let_go`: what a test does meanwhile falls between two
    tokens of what runs, however slow the machine is. The first `free` requests are not held.
    """

    name = "scripted"
    weight_ranks = 1

    def __init__(self, max_model_len: int = 64, length: int = 3, step: float = 0.0):
        self.max_model_len, self.length, self.step = max_model_len, length, step
        self.grows = 1
        self.alter: Callable[[EngineCompletion], EngineCompletion] = lambda completion: completion
        """Of each completion that has ended."""
        self.policy_version = UNKNOWN_VERSION
        self.failure = ""
        self.requests: list[tuple[str, list[int], int, SamplingSettings]] = []
        self.calls: list[str] = []
        self.closed = False
        self.unpaused = asyncio.Event()
        self.unpaused.set()
        self.aborted = 0
        """Requests, from the first on, that a pause of mode "abort" ends."""
        self._held_at: int | None = None
        self._free = 0
        self._moved = Changes()
        self.running = 0
        self.tokens_total = 0
        self.meet, self.arrive = asyncio.Event(), asyncio.Event()  # of an update's ranks and weights
        self.meet.set()
        self.arrive.set()
        self.checksums = [0xC0FFEE]
        self.errors: dict[str, Exception] = {}  # what calls of these names raise
        self.gives_masks = self.can_sleep = self.asleep = self.paused = False
        self.takes: list[str] = []  # capabilities of sampling parameters
        self.group: WeightGroupInfo | None = None

    def hold(self, tokens: int, free: int = 0) -> None:
        self._held_at, self._free = tokens, free

    def _holds(self, request: int, tokens: int) -> bool:
        return self._held_at is not None and request > self._free and tokens >= self._held_at

    def let_go(self) -> None:
        self._held_at = None
        self._moved.notify()

    def _fail(self, call: str) -> None:
        if call in self.errors:
            raise self.errors[call]

    def tokenizer(self) -> CharTokenizer:
        return CharTokenizer()

    async def start(self) -> None:
        self.calls.append("start")
        self._fail("start")

    async def close(self) -> None:
        self.closed = True

    async def generate(
        self, request_id: str, prompt_token_ids, n: int, sampling: SamplingSettings
    ) -> AsyncGenerator[EngineCompletion, None]:
        self.requests.append((request_id, [int(token) for token in prompt_token_ids], n, sampling))
        number = len(self.requests)
        tokens: dict[int, list[int]] = {index: [] for index in range(n)}
        versions: dict[int, list[int]] = {index: [] for index in range(n)}
        self.running += n
        try:
            while tokens:
                await asyncio.sleep(self.step)
                while self._holds(number, max(map(len, tokens.values()))) and number > self.aborted:
                    await self._moved.wait()
                if number <= self.aborted:
                    self.running -= len(tokens)
                    for index in list(tokens):
                        yield completion(index, tokens.pop(index), versions[index], "abort")
                    return
                await self.unpaused.wait()
                self._fail("generate")
                for index in list(tokens):
                    tokens[index].append(ord("a") + index)
                    versions[index].append(self.policy_version)
                    self.tokens_total += 1
                    made, whole = len(tokens[index]), self.length + self.grows * index
                    if made >= min(whole, sampling.max_new_tokens):
                        self.running -= 1
                        reason = "stop" if made >= whole else "length"
                        done = completion(index, tokens.pop(index), versions[index], reason)
                        yield self.alter(replace(done, mask=_mask(done.token_ids)) if sampling.masks else done)
        finally:
            self.running -= len(tokens)

    async def pause(self, mode: str, keep_kv_cache: bool = False) -> None:
        self.calls.append(f"pause {mode} {keep_kv_cache}")
        self._fail("pause")
        if mode == "abort":
            self.aborted = len(self.requests)
            self._moved.notify()
        self.paused = True
        self.unpaused.clear()

    async def resume(self) -> None:
        self.calls.append("resume")
        self.paused = False
        if not self.asleep:
            self.unpaused.set()

    def stats(self) -> EngineStats:
        return EngineStats(self.running, 0, -1.0, self.tokens_total)

    def capabilities(self) -> list[str]:
        masks, sleep = ["sampling_masks"] if self.gives_masks else [], ["sleep"] if self.can_sleep else []
        return ["weights.gloo", "weights.full", *masks, *sleep, *self.takes, "log_probs"]

    async def log_probs(self, request_id: str, token_ids: list[int], begin: int) -> np.ndarray:
        """Of a token its id over -100, less the tokens before it."""
        self._fail("log_probs")
        await self.unpaused.wait()
        check_prompt(token_ids, 1, self.max_model_len, len(self.tokenizer().get_vocab()))
        return np.array([token / -100 - at for at, token in enumerate(token_ids)][begin:], np.float32)

    async def sleep(self, level: int = 1) -> None:
        self.calls.append(f"sleep {level}")
        self._fail("sleep")
        self.asleep = True
        self.unpaused.clear()

    async def wake(self) -> None:
        self.calls.append("wake")
        self._fail("wake")
        self.asleep = False
        if not self.paused:
            self.unpaused.set()

    def check_manifest(self, manifest) -> None:
        self._fail("check_manifest")

    async def join_weight_group(self, info: WeightGroupInfo) -> None:
        self.calls.append(f"join {info.epoch}")
        await self.meet.wait()
        self._fail("join")
        self.group = info

    async def leave_weight_group(self) -> None:
        self.calls.append("leave")
        self.group = None

    async def receive_weights(self, manifest, timeout_seconds: float, path: str = "") -> list[int]:
        self.calls.append("receive")
        await self.arrive.wait()
        self._fail("receive")
        return self.checksums

    async def install_weights(self, policy_version: int) -> None:
        self.calls.append(f"install {policy_version}")
        self._fail("install")
        self.policy_version = policy_version

    async def set_version(self, policy_version: int) -> None:
        self.policy_version = policy_version


class SpeakingEngine(ScriptedEngine):
    """Every completion is what `say` answers to the text before it."""

    def __init__(self, say: Callable[[str], str]):
        super().__init__(max_model_len=500)
        self._say = say

    async def generate(
        self, request_id: str, prompt_token_ids, n: int, sampling: SamplingSettings
    ) -> AsyncGenerator[EngineCompletion, None]:
        said = [ord(letter) for letter in self._say("".join(map(chr, prompt_token_ids)))]
        for index in range(n):
            yield completion(index, said, [self.policy_version] * len(said), "stop")


def _mask(token_ids: np.ndarray) -> SamplingMask:
    """Candidates: nothing was cut off before the first token, then the token and the one after it."""
    pairs = [np.asarray([token, token + 1], np.int32) for token in token_ids[1:]]
    return SamplingMask(np.asarray([0] + [2] * len(pairs), np.int32), np.concatenate(pairs))


def completion(index: int, tokens: list[int], versions: list[int], reason: str) -> EngineCompletion:
    log_probs = np.full(len(tokens), -0.5 - index, np.float32)
    changes = [(version, position) for position, version in enumerate(versions)] or [(UNKNOWN_VERSION, 0)]
    spans = version_spans(changes, len(tokens))
    return EngineCompletion(index, np.asarray(tokens, np.int32), log_probs, reason, spans)


def quiet_host(kind: str, address: str = "127.0.0.1:0", security: SecuritySection | None = None) -> ServiceHost:
    """Return a host on a free loopback port, without metrics."""
    security = security or SecuritySection()
    return ServiceHost(kind, address, security, ServerSection(metrics=False, drain_seconds=6.0))


class InTestBroker(broker_pb2_grpc.BrokerServiceServicer):
    """As much of the broker as a rollout sees, in memory."""

    def __init__(self) -> None:
        self.run: broker_pb2.Run | None = None
        self.members: dict[str, broker_pb2.Member] = {}
        self.queue: list[experience_pb2.PromptInstance] = []
        self.attempts: dict[str, int] = {}
        self.leases: dict[str, experience_pb2.PromptInstance] = {}
        self.puts: list[broker_pb2.PutGroup] = []
        self.releases: list[broker_pb2.LeaseRelease] = []
        self.unscored: dict[str, bytes] = {}  # kept, by instance
        self.notices: list[broker_pb2.Notice] = []
        self.lost: set[str] = set()
        self.outcomes: list[int] = []  # consumed first; afterwards all groups are accepted
        self.calls: list[str] = []
        self.lease_versions: list[int] = []
        self.left: list[str] = []
        self.changed = asyncio.Condition()
        self._closed = False
        self._ids = itertools.count(1)

    def create_run(self, **fields) -> None:
        """Make the run "demo", anew if it was there."""
        spec = broker_pb2.RunSpec(
            run_id="demo",
            group_size=2,
            prompt_lease_ttl=to_duration(60.0),
            member_ttl=to_duration(15.0),
            sampling=experience_pb2.SamplingParams(max_new_tokens=8, temperature=1.0),
            verifiers=[reward_pb2.VerifierSpec(name="exact")],
        )
        spec.MergeFrom(broker_pb2.RunSpec(**fields))
        self.run = broker_pb2.Run(spec=spec, state=broker_pb2.RUN_STATE_ACTIVE, created_at=now_timestamp())
        self.members.clear()

    async def submit(self, *instances: experience_pb2.PromptInstance) -> None:
        async with self.changed:
            self.queue.extend(instances)
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool], timeout: float = 20.0) -> None:
        """Wait for a condition on what rollouts have done."""
        async with asyncio.timeout(timeout), self.changed:
            await self.changed.wait_for(condition)

    async def close(self) -> None:
        """Answer requests for prompts at once from now on: a rollout that stops waits for those under way."""
        self._closed = True
        await self.submit()

    def transcript(self, put: int = 0) -> experience_pb2.GroupTranscript:
        return experience_pb2.GroupTranscript.FromString(self.puts[put].group.transcript)

    def tensors(self, put: int = 0) -> experience_pb2.GroupTensors:
        return experience_pb2.GroupTensors.FromString(self.puts[put].group.tensors)

    async def _note(self, call: str) -> None:
        self.calls.append(call)
        async with self.changed:
            self.changed.notify_all()

    def _require_run(self) -> broker_pb2.Run:
        if self.run is None:
            raise not_found("run", "demo")
        return self.run

    async def GetRun(self, request, context):  # noqa: N802
        return broker_pb2.GetRunResponse(run=self._require_run())

    async def RegisterMember(self, request, context):  # noqa: N802
        run = self._require_run()
        self.members[request.member.instance_id] = request.member
        await self._note("register")
        return broker_pb2.RegisterMemberResponse(group_epoch=1, run=run)

    async def Heartbeat(self, request, context):  # noqa: N802
        run = self._require_run()
        if request.member.instance_id not in self.members:
            raise not_found("member", request.member.instance_id)
        self.members[request.member.instance_id] = request.member
        await self._note("heartbeat")
        return broker_pb2.HeartbeatResponse(group_epoch=1, run_state=run.state)

    async def LeaveMember(self, request, context):  # noqa: N802
        self.members.pop(request.instance_id, None)
        self.left.append(request.instance_id)
        await self._note("leave")
        return broker_pb2.LeaveMemberResponse(group_epoch=2)

    async def LeasePrompts(self, request, context):  # noqa: N802
        run = self._require_run()
        if run.state != broker_pb2.RUN_STATE_ACTIVE:
            raise failed_precondition("run", "it is finished")
        if request.holder not in self.members:
            raise failed_precondition("holder", f"{request.holder} is not a member")
        self.lease_versions.append(request.policy_version)
        granted = []
        async with self.changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(to_seconds(request.wait)):
                    await self.changed.wait_for(lambda: self._closed or self._grantable(request.policy_version))
            for instance in self._grantable(request.policy_version)[: request.max_prompts]:
                self.queue.remove(instance)
                attempt = self.attempts[instance.instance_id] = self.attempts.get(instance.instance_id, 0) + 1
                lease = broker_pb2.PromptLease(lease_id=f"lease-{next(self._ids)}", instance=instance, attempt=attempt)
                lease.unscored = instance.instance_id in self.unscored
                self.leases[lease.lease_id] = instance
                granted.append(lease)
        await self._note(f"lease {len(granted)}")
        return broker_pb2.LeasePromptsResponse(leases=granted)

    def _grantable(self, version: int) -> list[experience_pb2.PromptInstance]:
        return [
            instance
            for instance in self.queue
            if not instance.HasField("pinned_version")
            or instance.pinned_version == version
            or instance.instance_id in self.unscored
        ]

    async def RenewLeases(self, request, context):  # noqa: N802
        await self._note("renew")
        return broker_pb2.RenewLeasesResponse(
            lost=[name for name in request.lease_ids if name in self.lost or name not in self.leases]
        )

    async def ReleaseLeases(self, request, context):  # noqa: N802
        for release in request.releases:
            instance = self.leases.pop(release.lease_id, None)
            if instance is not None:
                self.releases.append(release)
                if release.unscored:
                    self.unscored[instance.instance_id] = release.unscored
        await self._note("release")
        return broker_pb2.ReleaseLeasesResponse()

    async def GetUnscored(self, request, context):  # noqa: N802
        return broker_pb2.GetUnscoredResponse(unscored=self.unscored[request.instance_id])

    async def ReportProgress(self, request, context):  # noqa: N802
        self.notices.append(request.event.notice)
        await self._note("report")
        return broker_pb2.ReportProgressResponse()

    async def PutExperience(self, request, context):  # noqa: N802
        outcomes = []
        for put in request.groups:
            outcome = self.outcomes.pop(0) if self.outcomes else broker_pb2.PUT_OUTCOME_ACCEPTED
            outcomes.append(outcome)
            if outcome == broker_pb2.PUT_OUTCOME_ACCEPTED:
                self.puts.append(put)
            if outcome != broker_pb2.PUT_OUTCOME_NO_ROOM:
                self.leases.pop(put.lease_id, None)
        await self._note(f"put {len(outcomes)}")
        return broker_pb2.PutExperienceResponse(outcomes=outcomes)


class InTestReward(reward_pb2_grpc.RewardServiceServicer):
    """The reward of a completion is its number of tokens; what `failures` holds is answered first."""

    def __init__(self) -> None:
        self.items: list[reward_pb2.ScoreItem] = []
        self.messages: list[int] = []  # items of each request
        self.failures: list[reward_pb2.Failure] = []
        self.unjudged = ""  # a text in completions whose answers are not judged
        self.raises_on = ""  # a text in completions on which the verifier raises
        self.breaks_on = ""  # a text in prompts under which the stream breaks
        self.refusals = 0  # streams that are refused, as for their rate
        self.silent = False
        self.delay = 0.0  # seconds before the answer to each message
        self.reward: float | None = None  # of every completion, instead of its number of tokens

    async def Execute(self, request, context):  # noqa: N802
        raise unavailable("reward service", "it is stopping")

    async def ScoreStream(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            self.messages.append(len(request.items))
            self.items.extend(request.items)
            if self.refusals:
                self.refusals -= 1
                raise resource_exhausted("rate", "too many calls", 0.01)
            if self.breaks_on and any(self.breaks_on in item.prompt for item in request.items):
                raise KeyError(self.breaks_on)
            await asyncio.sleep(self.delay)
            if not self.silent:
                yield reward_pb2.ScoreStreamResponse(results=map(self._result, request.items))

    def _result(self, item: reward_pb2.ScoreItem) -> reward_pb2.ScoreResult:
        if self.raises_on and self.raises_on in item.completion:
            message, place = "verifier 'exact' raised KeyError: 'b' (own.py:7)", "own.py:7"
            failure = reward_pb2.Failure(message=message, place=place, traceback="Traceback\n", retryable=True)
            return reward_pb2.ScoreResult(item_id=item.item_id, failure=failure)
        if self.failures:
            return reward_pb2.ScoreResult(item_id=item.item_id, failure=self.failures.pop(0))
        reward = item.completion_tokens if self.reward is None else self.reward
        score = reward_pb2.Score(reward=reward, format_acc=1.0, ans_acc=0.5, outcome=reward_pb2.OUTCOME_CORRECT)
        score.verifiers.add(name="own.py:length", reward=reward, outcome=reward_pb2.OUTCOME_CORRECT, ans_acc=0.5)
        score.verifiers.add(name="none", outcome=reward_pb2.OUTCOME_UNSPECIFIED)  # it abstained
        score.verifiers.add(name="length", reward=-1.0, outcome=reward_pb2.OUTCOME_UNJUDGED)
        if self.unjudged and self.unjudged in item.completion:
            score.unjudged, score.ans_acc = True, 0.0
        return reward_pb2.ScoreResult(item_id=item.item_id, score=score)
