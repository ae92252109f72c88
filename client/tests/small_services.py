"""Small services for the client's tests: the contract's behaviour as the client sees it, in memory, over real sockets.

The serving "policy" echoes: it answers a prompt with its own text, rewarded 1 if it contains the reference answer. A
prompt "dies" if its text contains "poison".
"""

import asyncio
import threading
from collections.abc import Callable

from quartet.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    experience_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    tensor_pb2,
)

from quartet_common.config import SecuritySection, ServerSection
from quartet_common.durations import now_timestamp
from quartet_common.errors import (
    aborted,
    already_exists,
    failed_precondition,
    not_found,
    resource_exhausted,
    unavailable,
)
from quartet_common.host import ServiceHost


class SmallBroker(broker_pb2_grpc.BrokerServiceServicer):
    """Keeps runs, prompts and events; answers serving prompts at once."""

    def __init__(self) -> None:
        self.runs: dict[str, broker_pb2.Run] = {}
        self.instances: dict[str, dict[str, experience_pb2.PromptInstance]] = {}
        self.sets: dict[tuple[str, str], list[experience_pb2.PromptInstance]] = {}
        self.events: dict[str, list[broker_pb2.RunEvent]] = {}
        self.requeued: list[str] = []
        self.room_made = 0  # what a trainer consumed
        self.drop_stream_after = 0  # cut the next CollectResults after that many messages
        self.watchers = 0  # streams of WatchRun that were opened
        self._changed = asyncio.Condition()

    def _run(self, run_id: str) -> broker_pb2.Run:
        if run_id not in self.runs:
            raise not_found("run", run_id)
        return self.runs[run_id]

    async def add_event(self, run_id: str, event: broker_pb2.RunEvent) -> None:
        """Append an event, numbered and timed."""
        async with self._changed:
            events = self.events.setdefault(run_id, [])
            event.event_id = f"{len(events) + 1:06d}"
            event.at.CopyFrom(now_timestamp())
            events.append(event)
            self._changed.notify_all()

    async def CreateRun(self, request, context):  # noqa: N802
        run_id = request.spec.run_id
        if run_id in self.runs:
            if self.runs[run_id].spec.group_size != (request.spec.group_size or 8):
                raise already_exists("run", run_id, "group_size")
            return broker_pb2.CreateRunResponse(run=self.runs[run_id], created=False)
        run = broker_pb2.Run(spec=request.spec, state=broker_pb2.RUN_STATE_ACTIVE, created_at=now_timestamp())
        run.spec.group_size = run.spec.group_size or 8
        run.spec.max_queued_prompts = run.spec.max_queued_prompts or 4096
        self.runs[run_id], self.instances[run_id] = run, {}
        changed = broker_pb2.RunStateChanged(state=broker_pb2.RUN_STATE_ACTIVE)
        await self.add_event(run_id, broker_pb2.RunEvent(run_state=changed))
        return broker_pb2.CreateRunResponse(run=run, created=True)

    async def GetRun(self, request, context):  # noqa: N802
        run = self._run(request.run_id)
        run.stats.queued = self._queued(request.run_id)
        return broker_pb2.GetRunResponse(run=run)

    async def ListRuns(self, request, context):  # noqa: N802
        return broker_pb2.ListRunsResponse(runs=list(self.runs.values()))

    async def FinishRun(self, request, context):  # noqa: N802
        run = self._run(request.run_id)
        if run.state == broker_pb2.RUN_STATE_ACTIVE:
            run.state, run.reason = request.state, request.reason
            changed = broker_pb2.RunStateChanged(state=request.state, reason=request.reason)
            await self.add_event(request.run_id, broker_pb2.RunEvent(run_state=changed))
        return broker_pb2.FinishRunResponse(run=run)

    async def DeleteRun(self, request, context):  # noqa: N802
        run = self.runs.get(request.run_id)
        if run is not None and run.state == broker_pb2.RUN_STATE_ACTIVE and not request.force:
            raise failed_precondition(f"run '{request.run_id}'", "it has not ended; finish it first, or force")
        return broker_pb2.DeleteRunResponse(deleted=self.runs.pop(request.run_id, None) is not None)

    def _queued(self, run_id: str) -> int:
        training = [i for i in self.instances[run_id].values() if i.purpose == experience_pb2.PURPOSE_TRAIN]
        return max(0, len(training) - self.room_made)

    async def SubmitPrompts(self, request, context):  # noqa: N802
        run, known = self._run(request.run_id), self.instances[request.run_id]
        if run.state != broker_pb2.RUN_STATE_ACTIVE:
            raise failed_precondition(f"run '{request.run_id}'", "it has ended")
        self._known(request)
        new = [instance for instance in request.instances if instance.instance_id not in known]
        for instance in request.instances:
            if instance.instance_id in known and known[instance.instance_id] != instance:
                raise already_exists("prompt instance", instance.instance_id, "its content is another")
        training = sum(1 for instance in new if instance.purpose == experience_pb2.PURPOSE_TRAIN)
        if run.prompts_ended and training:
            raise failed_precondition(f"run '{request.run_id}'", "its prompts have ended")
        if self._queued(request.run_id) + training > run.spec.max_queued_prompts:
            raise resource_exhausted("max_queued_prompts", "the queue is full", retry_after_seconds=0.05)
        for instance in new:
            known[instance.instance_id] = instance
            if instance.purpose == experience_pb2.PURPOSE_EVALUATE:
                self.sets.setdefault((request.run_id, request.evaluation_set), []).append(instance)
        return broker_pb2.SubmitPromptsResponse(accepted=len(new), duplicates=len(request.instances) - len(new))

    def _known(self, request) -> None:
        if request.follows_instance_id and request.follows_instance_id not in self.instances[request.run_id]:
            raise aborted("prompts", f"{request.follows_instance_id} is not known")

    async def EndPrompts(self, request, context):  # noqa: N802
        self._known(request)
        self._run(request.run_id).prompts_ended = True
        return broker_pb2.EndPromptsResponse()

    async def CollectResults(self, request, context):  # noqa: N802
        known = self.instances[request.run_id]
        for sent, instance_id in enumerate(request.instance_ids):
            if self.drop_stream_after and sent == self.drop_stream_after:
                self.drop_stream_after = 0
                raise unavailable("redis", "it is away", retry_after_seconds=0.05)
            if instance_id not in known:
                await asyncio.sleep(3600)  # never submitted: the client's deadline ends this
            yield self._result(known[instance_id])

    def _result(self, instance) -> broker_pb2.CollectResultsResponse:
        if "poison" in instance.prompt.text:
            reasons, kept = (["it raised (own.py:7)"], 9) if "kept" in instance.prompt.text else (["too long"], 0)
            dead = broker_pb2.DeadPrompt(
                instance=instance, attempts=1, reasons=reasons, died_at=now_timestamp(), unscored_bytes=kept
            )
            return broker_pb2.CollectResultsResponse(instance_id=instance.instance_id, dead=dead)
        return broker_pb2.CollectResultsResponse(
            instance_id=instance.instance_id, transcript=transcript(instance).SerializeToString()
        )

    async def WatchRun(self, request, context):  # noqa: N802
        self._run(request.run_id)
        self.watchers += 1
        position = int(request.after_event_id or 0)
        while True:
            async with self._changed:
                while len(self.events[request.run_id]) == position:
                    await self._changed.wait()
                fresh = self.events[request.run_id][position:]
            for event in fresh:
                position += 1
                yield broker_pb2.WatchRunResponse(event=event)
                if event.run_state.state > broker_pb2.RUN_STATE_ACTIVE:
                    return

    async def ListDead(self, request, context):  # noqa: N802
        self._run(request.run_id)
        instances = [i for i in self.instances[request.run_id].values() if "poison" in i.prompt.text]
        dead = [self._result(instance).dead for instance in instances]
        if request.instance_ids:
            dead = [each for each in dead if each.instance.instance_id in request.instance_ids]
        return broker_pb2.ListDeadResponse(dead=dead[: request.limit or 100], total=len(dead))

    async def GetUnscored(self, request, context):  # noqa: N802
        done = transcript(self.instances[request.run_id][request.instance_id])
        done.completions[0].ClearField("score")
        kept = experience_pb2.UnscoredGroup(group={"transcript": done.SerializeToString()})
        return broker_pb2.GetUnscoredResponse(unscored=kept.SerializeToString())

    async def RequeueDead(self, request, context):  # noqa: N802
        self._run(request.run_id)
        self.requeued += request.instance_ids
        return broker_pb2.RequeueDeadResponse(requeued=len(request.instance_ids) or 1)

    async def GetGroup(self, request, context):  # noqa: N802
        if request.instance_id not in self.instances[request.run_id]:
            raise not_found("prompt instance", request.instance_id)
        return broker_pb2.GetGroupResponse(state=broker_pb2.GROUP_STATE_QUEUED, step=-1)


def transcript(instance: experience_pb2.PromptInstance) -> experience_pb2.GroupTranscript:
    """Return the echo policy's group: one completion, the prompt's own text."""
    text, answer = instance.prompt.text, instance.prompt.reference.answer
    right = bool(answer) and answer in text
    score = reward_pb2.Score(
        reward=float(right),
        ans_acc=float(right),
        format_acc=1.0,
        outcome=reward_pb2.OUTCOME_CORRECT if right else reward_pb2.OUTCOME_INCORRECT,
        parsed_answer=text[-1:],
        reason="the answer is in the text" if right else "the answer is not in the text",
    )
    spans = [
        experience_pb2.VersionSpan(policy_version=3, begin=0, end=2),
        experience_pb2.VersionSpan(policy_version=4, begin=2, end=len(text)),
    ]
    completion = experience_pb2.CompletionInfo(
        text=text, finish_reason=experience_pb2.FINISH_REASON_STOP, version_spans=spans, score=score, tokens=len(text)
    )
    return experience_pb2.GroupTranscript(
        instance=instance, prompt_text=text, completions=[completion], finished_at=now_timestamp()
    )


def hostile_sample(text: str) -> broker_pb2.RunEvent:
    """Return a sampled group with a text wherever there may be one."""
    score = reward_pb2.Score(reward=0.0, outcome=reward_pb2.OUTCOME_INCORRECT, reason=text, parsed_answer=text)
    info = experience_pb2.CompletionInfo(text=f"<think>{text}</think>{text}", tokens=3, score=score)
    info.version_spans.add(policy_version=2, begin=0, end=3)
    instance = experience_pb2.PromptInstance(instance_id=text, prompt=experience_pb2.Prompt(text=text))
    done = experience_pb2.GroupTranscript(instance=instance, prompt_text=text, completions=[info], rollout_id=text)
    return broker_pb2.RunEvent(sample=broker_pb2.GroupSample(transcript=done.SerializeToString()))


class SmallReward(reward_pb2_grpc.RewardServiceServicer):
    """Rewards 1 if the completion contains the answer; refuses an empty one."""

    async def Score(self, request, context):  # noqa: N802
        results = []
        for item in request.items:
            result = reward_pb2.ScoreResult(item_id=item.item_id)
            if not item.reference.answer:
                result.failure.message = "the reference answer is empty"
            else:
                result.score.reward = float(item.reference.answer in item.completion)
                result.score.outcome = reward_pb2.OUTCOME_CORRECT
                result.score.reason = "it is in the text"
            results.append(result)
        return reward_pb2.ScoreResponse(results=results)

    async def ListVerifiers(self, request, context):  # noqa: N802
        info = reward_pb2.VerifierInfo(name="exact", description="The answer, character by character.")
        return reward_pb2.ListVerifiersResponse(verifiers=[info])


class SmallRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Generates the prompt's own text, n times."""

    async def GetStatus(self, request, context):  # noqa: N802
        return rollout_pb2.RolloutServiceGetStatusResponse(run_id="demo", engine="echo", policy_version=4)

    async def Generate(self, request, context):  # noqa: N802
        if request.run_id not in ("", "demo"):
            raise failed_precondition("run_id", f"this rollout works for run 'demo', not for '{request.run_id}'")
        info = experience_pb2.CompletionInfo(text=request.prompt.text, tokens=2, turns=1)
        completion = rollout_pb2.GeneratedCompletion(
            info=info,
            token_ids=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_INT32, shape=[2], data=b"\x07\0\0\0\x08\0\0\0"),
            log_probs=tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[2], data=b"\0\0\x80\xbf\0\0\0\0"),
        )
        if request.sampling_masks:  # of the first token all, of the second two
            counts, ids = b"\0\0\0\0\x02\0\0\0", b"\x06\0\0\0\x08\0\0\0"
            completion.sampling_mask_counts.CopyFrom(tensor_pb2.Tensor(dtype=2, shape=[2], data=counts))
            completion.sampling_mask_token_ids.CopyFrom(tensor_pb2.Tensor(dtype=2, shape=[2], data=ids))
        return rollout_pb2.GenerateResponse(completions=[completion] * max(1, request.prompt.sampling.n))


class SmallServices:
    """The small services on free ports, in a thread of their own; `broker`: the address of one of them."""

    def __init__(self, broker: str = "127.0.0.1:0") -> None:
        self._listen = {"broker": broker}
        self.addresses: dict[str, str] = {}
        self._hosts: dict[str, ServiceHost] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> "SmallServices":
        self._thread.start()
        self.call(self._start)
        return self

    def __exit__(self, *exc: object) -> None:
        self.call(self._stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()

    def call(self, work: Callable, *args):
        """Run a coroutine function in the services' loop and return its result."""
        return asyncio.run_coroutine_threadsafe(work(*args), self._loop).result(timeout=30)

    async def _start(self) -> None:
        self.broker = SmallBroker()
        servicers = {
            "broker": (broker_pb2_grpc.add_BrokerServiceServicer_to_server, self.broker),
            "reward": (reward_pb2_grpc.add_RewardServiceServicer_to_server, SmallReward()),
            "rollout": (rollout_pb2_grpc.add_RolloutServiceServicer_to_server, SmallRollout()),
        }
        for kind, (add, servicer) in servicers.items():
            host = ServiceHost(
                kind,
                self._listen.get(kind, "127.0.0.1:0"),
                SecuritySection(),
                ServerSection(metrics=False, drain_seconds=0.1),
            )
            add(servicer, host.server)
            await host.start()
            self._hosts[kind], self.addresses[kind] = host, host.address

    async def _stop(self) -> None:
        for host in self._hosts.values():
            await host.drain()


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)
