"""One prompt group: prompt -> completions -> scores -> experience.

    state        ends with                fails on
    GENERATING   all completions          prompt refused, engine or environment failed, pinned version gone, lease lost
    SCORING      all scores               verifier failed, lease lost
    UPLOADING    the broker's outcome     refused, lease lost

If a verifier fails, the group's completions are kept at the broker, and its next delivery begins with SCORING. They are
not generated again, because selecting completions that the verifier can judge would bias the training.

In every case the lease ends exactly once: by the upload, by its release, or by the broker's revocation.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import Enum

import numpy as np
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2

from quartet_common import tracing
from quartet_common.chats import as_json, continued_text
from quartet_common.durations import now_timestamp, to_duration
from quartet_common.log import get_logger, log_fields
from quartet_common.sampling import Effect, altered
from quartet_common.tensors import encode
from quartet_rollout.agents.completions import SeatCompletion
from quartet_rollout.agents.experience import agents_info, agents_tensors
from quartet_rollout.agents.served import EpisodeTask, ServedEnvironments
from quartet_rollout.broker import Leases, UploadBatcher
from quartet_rollout.callbacks import Callbacks, GroupEnd
from quartet_rollout.chats import text_before_continued
from quartet_rollout.concurrency import Concurrency
from quartet_rollout.engines.base import UNKNOWN_VERSION, EngineCompletion, EngineError, PromptError
from quartet_rollout.environments.conversation import PlayedCompletion, inserted_tokens
from quartet_rollout.environments.episode import EpisodeContext, run_episode
from quartet_rollout.environments.registry import Chosen, Environments, served_environment
from quartet_rollout.experience import (
    GeneratedGroup,
    completion_info,
    group_header,
    group_tensors,
    put_turns,
    versions_of,
)
from quartet_rollout.generation import (
    GenerationRequest,
    PromptRefused,
    generate_completions,
    sampling_values,
    scheduled,
    seeded,
)
from quartet_rollout.metrics import COMPLETIONS, GROUPS, TOKENS
from quartet_rollout.release import LeaseReleased, released
from quartet_rollout.scoring import GroupScorer, ScoringFailed
from quartet_rollout.state import RolloutState
from quartet_rollout.teachers import TeacherFailed, Teachers
from quartet_rollout.vocabulary import vocabulary_digest

log = get_logger(__name__)

_PURPOSES = {
    experience_pb2.PURPOSE_TRAIN: "train",
    experience_pb2.PURPOSE_EVALUATE: "evaluate",
    experience_pb2.PURPOSE_SERVE: "serve",
}


class Stage(Enum):
    """State of a group."""

    GENERATING = "generating"
    SCORING = "scoring"
    """All completions are generated; scores are missing."""
    UPLOADING = "uploading"
    """Finished; the broker has not answered yet."""
    SETTLED = "settled"
    """The lease has ended, or is being released."""


class Group:
    """One leased prompt, from its completions to the end of its lease."""

    def __init__(
        self,
        lease: broker_pb2.PromptLease,
        state: RolloutState,
        leases: Leases,
        scorer: GroupScorer,
        uploads: UploadBatcher,
        environments: Environments,
        concurrency: Concurrency,
        served: ServedEnvironments | None,
        teachers: Teachers,
        callbacks: Callbacks,
    ):
        """`served`: None without a model endpoint."""
        assert state.spec is not None and state.engine is not None and state.reader is not None  # `may_lease` says so
        self._state, self._spec, self._engine, self._reader = state, state.spec, state.engine, state.reader
        self._leases, self._scorer, self._uploads = leases, scorer, uploads
        self._environments, self._concurrency, self._served = environments, concurrency, served
        self._teachers, self._callbacks = teachers, callbacks
        self._scores: list[asyncio.Task[None]] = []
        self.lease = lease
        self.stage = Stage.SCORING if lease.unscored else Stage.GENERATING
        self.generated = 0
        """Completions that the engine has finished."""
        self.traceparent = ""
        """Context of the span that traces it; "" if it is not traced."""
        self.n: int = sampling_values(lease.instance.prompt, self._spec, lease.instance.purpose)["n"]

    async def run(self) -> None:
        """Generate, score and upload, or release the lease.

        Raises:
            EngineError: the engine has failed; the lease is released.
        """
        lease, state = self.lease, self._state
        attributes = {
            "quartet.run": state.run_id,
            "quartet.instance": lease.instance.instance_id,
            "quartet.attempt": lease.attempt,
        }
        about = log_fields(run=state.run_id, group=lease.instance.instance_id, version=state.policy_version)
        traced = tracing.span("rollout", lease.instance.traceparent, kind="consumer", attributes=attributes)
        with about, traced as span:
            self.traceparent = span.traceparent
            self._callbacks.group_begins(lease)
            end = GroupEnd(lease.instance, "cancelled")
            try:
                made = await self._make()
                end = GroupEnd(lease.instance, await self._upload(made), group=made)
            except Exception as error:
                release = released(error)
                end = GroupEnd(lease.instance, release.outcome, str(release))
                await self._release(release)
                if isinstance(error, EngineError) and not isinstance(error, PromptError):
                    raise
            finally:
                self._callbacks.group_ended(end)

    async def _upload(self, made: experience_pb2.ExperienceGroup) -> str:
        """Send the group to the broker, and return the outcome's name."""
        self.stage = Stage.UPLOADING
        self._state.changes.notify()
        made.header.traceparent = self.traceparent
        with tracing.span("put"):
            outcome = await self._uploads.put(self.lease.lease_id, made)
        self.stage = Stage.SETTLED
        name = broker_pb2.PutOutcome.Name(outcome).removeprefix("PUT_OUTCOME_").lower()
        GROUPS.labels(name).inc()
        if outcome == broker_pb2.PUT_OUTCOME_ACCEPTED:
            self._state.groups_total += 1
        else:
            log.info("group not stored", extra={"group": self.lease.instance.instance_id, "outcome": name})
        return name

    async def _release(self, error: LeaseReleased) -> None:
        lease, release = self.lease, error.of(self.lease)
        GROUPS.labels(error.outcome).inc()
        log.info(
            "prompt given back: %s",
            error,
            extra={"group": lease.instance.instance_id, "attempt": lease.attempt, "permanent": error.permanent},
        )
        if release.unscored:  # kept however long it takes: the lease is still renewed
            await self._leases.release([release], timeout=None)
        else:
            self.stage = Stage.SETTLED
            await self._leases.release([release])

    async def _make(self) -> experience_pb2.ExperienceGroup:
        """Generate and score; completions of an earlier delivery are only scored. Raises what `released` classifies."""
        try:
            kept = await self._leases.unscored(self.lease) if self.lease.unscored else b""
            group = self._score_again(kept) if kept else await self._generate()
            if _has_teacher(self.lease.instance, self._spec) and not group.tensors.HasField("teacher_log_probs"):
                await self._judge(group)
            if self._scores:
                with tracing.span("await scores"):
                    await asyncio.wait(self._scores)
            if (error := self._failure()) is not None:
                raise LeaseReleased(str(error), permanent=True, unscored=b"" if error.permanent else group.unscored())
            for score in self._scores:
                score.result()  # raises if a task failed otherwise
            return group.scored()
        finally:
            for score in self._scores:
                score.cancel()
            await asyncio.gather(*self._scores, return_exceptions=True)

    async def _judge(self, group: GeneratedGroup) -> None:
        digest = vocabulary_digest(self._engine.tokenizer())
        try:
            with tracing.span("await teacher"):
                await self._teachers.judge(self.lease.instance.prompt, self._spec, group.tensors, digest)
        except TeacherFailed as error:  # as with a verifier, completions are not selected by what can be judged
            raise LeaseReleased(str(error), permanent=True, unscored=group.unscored()) from error

    def _score_again(self, kept: bytes) -> GeneratedGroup:
        group = GeneratedGroup.of_unscored(kept, self.lease.attempt)
        for item, info in zip(group.items, group.transcript.completions, strict=True):
            item.traceparent = self.traceparent
            self._score(item, info)
        return group

    def _score(
        self, item: reward_pb2.ScoreItem, info: experience_pb2.CompletionInfo, began: float | None = None
    ) -> None:
        """Begin to score a completion; the score is written to `info`. `began`: start of the generation."""
        scored = self._scorer.submit(item)

        async def take() -> None:
            info.score.CopyFrom(await scored)
            if began is not None:
                info.scored_after.CopyFrom(to_duration(time.monotonic() - began))

        self._scores.append(asyncio.create_task(take()))

    def _failure(self) -> ScoringFailed | None:
        """Return the failure of a completion's scoring, a permanent one first; None if none has failed so far."""
        errors = [score.exception() for score in self._scores if score.done()]
        failures = [error for error in errors if isinstance(error, ScoringFailed)]
        return max(failures, key=lambda error: error.permanent, default=None)

    async def _generate(self) -> GeneratedGroup:
        """Generate, and begin to score each completion as soon as it finishes."""
        instance = self.lease.instance
        if (served := served_environment(instance.prompt, self._spec)) is not None:
            return await self._play(served)
        token_ids, request = await self._reader.read_in_turn(instance.prompt, self._spec, instance.purpose)
        request = scheduled(request, instance, self._spec, self._engine.policy_version)
        request = seeded(request, instance)
        _check_training(instance, request, self._spec)
        chosen = self._environments.choose(instance.prompt, self._spec)
        transcript = experience_pb2.GroupTranscript(
            instance=instance,
            prompt_text=self._reader.text(token_ids),
            rollout_id=self._state.instance_id,
            started_at=now_timestamp(),
        )
        began = time.monotonic()
        template = self._score_item(request.settings.max_new_tokens, transcript.prompt_text)
        items: dict[int, reward_pb2.ScoreItem] = {}
        completions: list[EngineCompletion] = []
        with tracing.span("generate") as span:
            async with aclosing(self._stream(token_ids, request, chosen)) as stream:
                async for completion in stream:
                    completions.append(completion)
                    self.generated += 1
                    self._count(completion.token_ids.size - inserted_tokens(completion), completion.finish_reason)
                    info = transcript.completions.add()
                    info.CopyFrom(completion_info(completion, self._reader.text(completion.token_ids)))
                    info.generated_after.CopyFrom(to_duration(time.monotonic() - began))
                    if template is not None:
                        item = items[completion.index] = reward_pb2.ScoreItem()
                        item.CopyFrom(template)
                        last_turn = chosen is not None and chosen.scores_last_turn
                        item.completion = self._scored_text(completion, info.text, last_turn)
                        item.completion_tokens = completion.token_ids.size
                        item.truncated = completion.finish_reason == "length"
                        self._score(item, info, began)
                    if (error := self._failure()) is not None and error.permanent:
                        raise error  # the group has failed: stop generating
            completions.sort(key=lambda one: one.index)
            transcript.completions.sort(key=lambda info: info.index)
            header = group_header(self.lease, completions)
            span.attributes.update(_traced(header))
        self.stage = Stage.SCORING
        self._concurrency.finished(self.n)
        self._state.changes.notify()  # The prompt loop may lease again, before these completions are scored.
        self._check(completions)
        tensors = group_tensors([token_ids] * len(completions), completions, request.settings)
        turns = [one for one in completions if isinstance(one, PlayedCompletion)]
        if any(one.turns > 1 or one.has_turn_rewards for one in turns):
            put_turns(tensors, turns, [range(one.turns) for one in turns], [one.turn_rewards for one in turns])
            tensors.outcome_rewards.CopyFrom(encode(np.zeros(len(turns), np.float32)))
        return GeneratedGroup(header, tensors, transcript, [items[index] for index in sorted(items)])

    async def _play(self, spec: experience_pb2.EnvironmentSpec) -> GeneratedGroup:
        """Have the environment service play the completions; it scores them too."""
        instance = self.lease.instance
        if self._served is None:
            raise PromptRefused("environment.served", True, "a rollout with a model endpoint: rollout.http.address")
        if instance.prompt.verifiers and not spec.add_verifiers:
            names = ", ".join(one.name for one in instance.prompt.verifiers)
            raise PromptRefused("prompt.verifiers", names, "none, or environment.add_verifiers")
        request = self._reader.request(instance.prompt, self._spec, instance.purpose)
        request = seeded(scheduled(request, instance, self._spec, self._engine.policy_version), instance)
        _check_training(instance, request, self._spec)
        transcript = experience_pb2.GroupTranscript(
            instance=instance, rollout_id=self._state.instance_id, started_at=now_timestamp()
        )
        task = EpisodeTask(self.lease.lease_id, self._spec.run_id, instance.prompt, spec, request, self.traceparent)
        played: list[SeatCompletion] = []
        with tracing.span("play") as span:
            async with aclosing(self._served.play(task)) as stream:
                async for of_episode in stream:
                    played += of_episode
                    self.generated += 1
            played.sort(key=lambda one: one.episode)
            _same_seats(played)
            transcript.prompt_text = self._reader.text(played[0].rows[0].prompt_token_ids)
            template = None
            if spec.add_verifiers:
                template = self._score_item(request.settings.max_new_tokens, transcript.prompt_text)
            items: list[reward_pb2.ScoreItem] = []
            for index, one in enumerate(played):
                info = transcript.completions.add()
                info.CopyFrom(agents_info(one, index, transcript.prompt_text, self._reader.text))
                self._count(info.tokens - info.inserted_tokens, one.rows[-1].completion.finish_reason)
                if template is not None:
                    item = reward_pb2.ScoreItem()
                    item.CopyFrom(template)
                    last = spec.scored_text == experience_pb2.SCORED_TEXT_LAST_TURN
                    item.completion = self._reader.text(one.last_turn) if last else info.text
                    item.completion_tokens = info.tokens
                    item.truncated = info.finish_reason == experience_pb2.FINISH_REASON_LENGTH
                    items.append(item)
                    self._score(item, info)
            rows: list[EngineCompletion] = [row.completion for one in played for row in one.rows]
            header = group_header(self.lease, rows)
            header.completions = len(played)
            span.attributes.update(_traced(header))
        self._concurrency.finished(self.n)
        self._check(rows)
        return GeneratedGroup(header, agents_tensors(played, request.settings), transcript, items)

    def _stream(
        self, token_ids: np.ndarray, request: GenerationRequest, chosen: Chosen | None
    ) -> AsyncGenerator[EngineCompletion, None]:
        if chosen is None:
            return generate_completions(self._engine, self.lease.lease_id, token_ids, request)
        assert self._environments.writer is not None  # there is a reader
        context = EpisodeContext(
            engine=self._engine,
            request_id=self.lease.lease_id,
            prompt=self.lease.instance.prompt,
            prompt_token_ids=token_ids,
            request=request,
            chosen=chosen,
            reader=self._reader,
            writer=self._environments.writer,
            tools=self._environments.tools,
            run_id=self._spec.run_id,
        )
        return run_episode(context)

    def _count(self, sampled_tokens: int, finish_reason: str) -> None:
        TOKENS.labels(_PURPOSES.get(self.lease.instance.purpose, "other")).inc(sampled_tokens)
        COMPLETIONS.labels(finish_reason).inc()

    def _scored_text(self, completion: EngineCompletion, text: str, last_turn: bool) -> str:
        """Return what verifiers read of a completion: with the message that it continues, or only its last turn."""
        if last_turn:
            assert isinstance(completion, PlayedCompletion)
            begin, end = completion.last_turn
            if begin:
                return self._reader.text(completion.token_ids[begin:end])
        return continued_text(self.lease.instance.prompt.chat) + text

    def _score_item(self, max_new_tokens: int, prompt_text: str) -> reward_pb2.ScoreItem | None:
        """Return the fields shared by all score items of the group, or None for a serving prompt without a verifier."""
        prompt = self.lease.instance.prompt
        serving = self.lease.instance.purpose == experience_pb2.PURPOSE_SERVE
        if serving and not prompt.verifiers and not prompt.HasField("reference"):
            return None
        verifiers = prompt.verifiers or self._spec.verifiers
        if not verifiers:
            raise LeaseReleased("neither the prompt nor the run names a verifier", permanent=True)
        return reward_pb2.ScoreItem(
            reference=prompt.reference,
            verifiers=verifiers,
            max_new_tokens=max_new_tokens,
            run_id=self._spec.run_id,
            prompt=text_before_continued(prompt_text, prompt.chat),
            traceparent=self.traceparent,
            columns=prompt.columns,
            messages=as_json(prompt.chat) if prompt.HasField("chat") else "",
        )

    def _check(self, completions: list[EngineCompletion]) -> None:
        """Raise LeaseReleased for completions that are unusable for training, or of another than the pinned version."""
        versions = versions_of(completions)
        instance = self.lease.instance
        if not versions:
            raise LeaseReleased("the engine generated no token")
        if UNKNOWN_VERSION in versions:
            raise LeaseReleased("tokens of weights of unknown version", counted=False)
        if (pinned := pinned_version(instance)) is not None and versions != {pinned}:
            raise LeaseReleased(f"pinned to version {pinned}, generated by {sorted(versions)}", counted=False)
        finite = all(np.isfinite(completion.log_probs).all() for completion in completions)
        if instance.purpose == experience_pb2.PURPOSE_TRAIN and not finite:
            raise LeaseReleased("the engine gave log-probs that are not finite")


def _same_seats(played: Sequence[SeatCompletion]) -> None:
    """Raise LeaseReleased if an episode has other trainable seats than the first: there is nothing to compare."""
    seats: dict[int, list[str]] = {}
    for one in played:
        seats.setdefault(one.episode, []).append(one.seat)
    first, *others = [sorted(names) for names in seats.values()]
    for names in others:
        if names != first:
            raise LeaseReleased(
                f"environment: an episode has the trainable seats {names}, another {first}; allowed: the same in all",
                permanent=True,
            )


def _has_teacher(instance: experience_pb2.PromptInstance, spec: broker_pb2.RunSpec) -> bool:
    return instance.purpose == experience_pb2.PURPOSE_TRAIN and bool(spec.teachers)


def _check_training(
    instance: experience_pb2.PromptInstance, request: GenerationRequest, spec: broker_pb2.RunSpec
) -> None:
    """Raise PromptRefused for a training prompt at temperature 0, with which its whole batch would fail in the trainer;
    for one with a teacher that the run lacks, or sampled from another distribution than that which a teacher judges."""
    settings = request.settings
    if instance.purpose == experience_pb2.PURPOSE_TRAIN and not settings.temperature > 0:
        raise PromptRefused("sampling.temperature", settings.temperature, "above 0, or another purpose than training")
    if _has_teacher(instance, spec):
        if (teacher := instance.prompt.teacher) and teacher not in spec.teachers:
            raise PromptRefused("prompt.teacher", f"'{teacher}'", f"one of run.teachers: {', '.join(spec.teachers)}")
        for name, value in altered(settings, Effect.REMOVES).items():
            raise PromptRefused(f"sampling.{name}", value, "its default: a teacher judges the whole vocabulary")
        if settings.temperature != 1:
            raise PromptRefused("sampling.temperature", settings.temperature, "1, at which a teacher judges")


def pinned_version(instance: experience_pb2.PromptInstance) -> int | None:
    """Return the policy version that must generate every token, or None for the live one."""
    if instance.HasField("pinned_version") and instance.pinned_version >= 0:
        return instance.pinned_version
    return None


def _traced(header: experience_pb2.GroupHeader) -> dict[str, tracing.Value]:
    return {
        "quartet.completions": header.completions,
        "quartet.tokens": header.completion_tokens,
        "quartet.policy_version.oldest": header.min_policy_version,
        "quartet.policy_version.newest": header.max_policy_version,
    }
