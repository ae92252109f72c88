"""The asyncio client of the four services."""

import asyncio
import os
import secrets
import socket
import uuid
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path

from pydantic import ValidationError
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2, rollout_pb2, trainer_pb2

from quartet_client.connection import ALL_KINDS, Connections, service_status, service_statuses
from quartet_client.control import Checkpoint, Drained, deadline, held, trainer_status, until_reported
from quartet_client.data import DataSection
from quartet_client.errors import InputError
from quartet_client.events import RunEvent
from quartet_client.models import (
    Completion,
    DeadPrompt,
    Evaluation,
    Group,
    GroupPlace,
    Handle,
    Run,
    Score,
    ServiceStatus,
)
from quartet_client.prompts import Prompt, PromptLike, parse_prompts
from quartet_client.scoring import best, own_answers, score_items
from quartet_client.streams import (
    GroupHistory,
    batches,
    collect_results,
    evaluate_run,
    group_history,
    submit_batch,
    watch_run,
)
from quartet_common import tracing
from quartet_common.config import AddressesSection, ConfigError, RunSection, SecuritySection, load_config
from quartet_common.durations import to_duration
from quartet_common.run_spec import run_spec
from quartet_common.sections import VerifierSection, by_name

_PURPOSES = ("serve", "train", "evaluate")
_END_STATES = ("succeeded", "failed", "cancelled")
CURRICULUM = "broker.curriculum"  # the capability of brokers that follow RunSpec.curriculum
_MAX_SCORE_ITEMS = 1024


class AsyncClient:
    """A connection to Quartet's services, for asyncio programs. Every method raises QuartetError.

    Args:
        broker, reward, rollout, trainer, environment: host:port of each; the defaults are those of the run file.
        security: TLS and token; by default plaintext without a token.
        timeout: deadline of each ordinary call, in seconds.

    Use it as ``async with AsyncClient() as client:``, in one event loop. It connects at the first call.
    """

    def __init__(
        self,
        broker: str | None = None,
        *,
        reward: str | None = None,
        rollout: str | None = None,
        trainer: str | None = None,
        environment: str | None = None,
        security: SecuritySection | None = None,
        timeout: float = 30.0,
    ):
        given = {"broker": broker, "reward": reward, "rollout": rollout, "trainer": trainer, "environment": environment}
        try:
            addresses = AddressesSection(**{kind: address for kind, address in given.items() if address is not None})
        except ValidationError as error:
            raise InputError(f"addresses: {error.errors(include_url=False)[0]['msg']}") from error
        self.connections = Connections(addresses, security or SecuritySection(), timeout)
        self._broker, self._trainer = self.connections.broker, self.connections.trainer

    @classmethod
    def from_config(
        cls, path: Path | None = None, overrides: Sequence[str] = (), timeout: float = 30.0
    ) -> "AsyncClient":
        """Return a client with the addresses and security of a run file."""
        try:
            config = load_config("data", DataSection, path, overrides)
            tracing.configure("client", f"{socket.gethostname()}-{os.getpid()}", config.tracing)
        except ConfigError as error:
            raise InputError(str(error)) from error
        return cls(**config.addresses.model_dump(exclude_unset=True), security=config.security, timeout=timeout)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.connections.close()

    # Runs

    async def create_run(self, run: RunSection | broker_pb2.RunSpec | str, extend: bool = False) -> Run:
        """Create a run, or return the existing one if it has the same specification.

        Args:
            run: its [run] section, its RunSpec, or only its id, with the broker's defaults for all else.
            extend: let an existing run continue to a higher `max_steps` or with more prompts, even after it succeeded.
        """
        if isinstance(run, str):
            spec = broker_pb2.RunSpec(run_id=run)
        else:
            spec = run_spec(run) if isinstance(run, RunSection) else run
        if spec.HasField("curriculum"):  # an older broker would ignore it
            await self._broker.require(CURRICULUM)
        response = await self._broker.call(
            self._broker.stub.CreateRun, broker_pb2.CreateRunRequest(spec=spec, extend=extend)
        )
        return Run.from_proto(response.run)

    async def get_run(self, run_id: str) -> Run:
        """Return a run with its statistics and live members."""
        response = await self._broker.call(self._broker.stub.GetRun, broker_pb2.GetRunRequest(run_id=run_id))
        return Run.from_proto(response.run, response.members)

    async def list_runs(self) -> list[Run]:
        """Return all runs, newest first."""
        runs: list[Run] = []
        request = broker_pb2.ListRunsRequest()
        while True:
            response = await self._broker.call(self._broker.stub.ListRuns, request)
            runs += (Run.from_proto(run) for run in response.runs)
            if not response.next_page_token:
                return runs
            request.page_token = response.next_page_token

    async def finish_run(self, run_id: str, state: str = "cancelled", reason: str = "") -> Run:
        """End a run as "cancelled", "succeeded" or "failed". A run that has ended keeps its state."""
        if state not in _END_STATES:
            raise InputError(f"state: got '{state}'; allowed: {', '.join(_END_STATES)}")
        request = broker_pb2.FinishRunRequest(
            run_id=run_id, state=f"RUN_STATE_{state.upper()}", reason=reason, ending=broker_pb2.RUN_ENDING_REQUESTED
        )
        return Run.from_proto((await self._broker.call(self._broker.stub.FinishRun, request)).run)

    async def delete_run(self, run_id: str, force: bool = False) -> bool:
        """Delete a finished run (with `force`, any run) and its data. Return False if it does not exist."""
        request = broker_pb2.DeleteRunRequest(run_id=run_id, force=force)
        return (await self._broker.call(self._broker.stub.DeleteRun, request)).deleted

    async def end_prompts(self, run_id: str, follows: str = "") -> None:
        """Declare that all training prompts have been submitted.

        Args:
            follows: id of the last submitted prompt instance. A broker that lacks it, because its Redis was restored
                from an earlier state, answers ABORTED: submit again from the first prompt on.
        """
        request = broker_pb2.EndPromptsRequest(run_id=run_id, follows_instance_id=follows)
        await self._broker.call(self._broker.stub.EndPrompts, request)

    # Prompts and their completions

    async def submit(
        self,
        run_id: str,
        prompts: PromptLike | Iterable[PromptLike],
        *,
        purpose: str = "serve",
        evaluation_set: str = "",
        instance_ids: Sequence[str] | None = None,
        timeout: float = 600.0,
    ) -> list[Handle]:
        """Queue prompts and return a handle for each, for `results`.

        Args:
            prompts: texts, dictionaries with the fields of a JSONL line, or Prompts.
            purpose: "serve" (answered, never trained), "train", or "evaluate" (stored in `evaluation_set`).
            instance_ids: idempotency keys, one per prompt; random by default. With your own keys, a retry after a
                failure duplicates nothing.
            timeout: seconds to wait for room in the queue.
        """
        if purpose not in _PURPOSES:
            raise InputError(f"purpose: got '{purpose}'; allowed: {', '.join(_PURPOSES)}")
        parsed = parse_prompts(prompts)
        if instance_ids is None:
            call = uuid.uuid4().hex
            instance_ids = [f"{purpose}-{call}/{index}" for index in range(len(parsed))]
        elif len(instance_ids) != len(parsed):
            raise InputError(f"instance_ids: got {len(instance_ids)} for {len(parsed)} prompts; give one for each")
        instances = [
            experience_pb2.PromptInstance(
                instance_id=instance_id, prompt=prompt.to_proto(f"prompt-{index}"), purpose=f"PURPOSE_{purpose.upper()}"
            )
            for index, (instance_id, prompt) in enumerate(zip(instance_ids, parsed, strict=True))
        ]
        deadline = asyncio.get_running_loop().time() + timeout
        for batch in batches(instances):
            await submit_batch(self.connections, run_id, batch, evaluation_set, deadline=deadline)
        return [Handle(run_id, instance_id) for instance_id in instance_ids]

    def results(self, handles: Iterable[Handle], timeout: float = 600.0) -> AsyncGenerator[Group, None]:
        """Yield the group of each handle as it is finished; handles of several runs, one run after the other.

        A dead prompt comes as a group without completions and with `dead` set.

        Args:
            timeout: seconds without a new result after which QuartetError is raised.
        """
        return collect_results(self.connections, handles, timeout)

    async def generate(
        self,
        prompt: PromptLike,
        *,
        address: str | None = None,
        run_id: str = "",
        sampling_masks: bool = False,
        timeout: float = 300.0,
    ) -> list[Completion]:
        """Return completions of one prompt by a rollout's current weights. They are neither scored nor stored.

        Args:
            address: of the rollout; by default the configured one.
            run_id: the run that the rollout must work for; by default any.
            sampling_masks: also return each token's candidates, where top_p, top_k or min_p exclude others.
        """
        request = rollout_pb2.GenerateRequest(
            prompt=Prompt.parse(prompt).to_proto("generate"), run_id=run_id, sampling_masks=sampling_masks
        )
        rollout = self.connections.rollout_at(address or "")
        answer = await rollout.call(rollout.stub.Generate, request, timeout)
        return [Completion.from_generated(completion) for completion in answer.completions]

    async def score(
        self,
        completions: str | Sequence[str] | None = None,
        prompt: PromptLike | None = None,
        verifiers: Sequence[str | VerifierSection] = (),
        timeout: float = 300.0,
    ) -> list[Score]:
        """Return the reward service's score of each completion of one prompt.

        Verifiers get all of the prompt: reference, tests, columns and messages. Token counts are unknown, and a chat is
        not rendered: its text is that of its messages.

        Args:
            completions: one text or several; a lone surrogate is sent as its escape, `\\ud800`. None: the prompt's
                gt_answer, alone, in tags and in a box, and the best of these scores is returned.
            prompt: a row of the data, with its gt_answer, test_cases or test_program; required.
            verifiers: names, or names with weight and parameters; by default the prompt's own.
        """
        row = Prompt.parse(prompt)
        chosen = [VerifierSection(**by_name(one)) if isinstance(one, str) else one for one in verifiers]
        if not (chosen := chosen or row.verifiers):
            raise InputError(
                "verifiers: got none; allowed: at least one of the reward service's, e.g. think_answer_tags"
            )
        if completions is None:
            return [best(await self.score(own_answers(row), row, chosen, timeout))[1]]
        items = score_items([completions] if isinstance(completions, str) else completions, row, chosen)
        reward = self.connections.reward
        scores: list[Score] = []
        for begin in range(0, len(items), _MAX_SCORE_ITEMS):
            request = reward_pb2.ScoreRequest(items=items[begin : begin + _MAX_SCORE_ITEMS])
            answer = await reward.call(reward.stub.Score, request, timeout)
            scores += [Score.from_result(result) for result in answer.results]
        return scores

    async def list_verifiers(self) -> dict[str, str]:
        """Return the reward service's verifiers: name and description."""
        reward = self.connections.reward
        answer = await reward.call(reward.stub.ListVerifiers, reward_pb2.ListVerifiersRequest())
        return {verifier.name: verifier.description for verifier in answer.verifiers}

    async def evaluate(
        self,
        run_id: str,
        evaluation_set: str,
        *,
        prompts: PromptLike | Iterable[PromptLike] | None = None,
        policy_version: int | None = None,
        hold: bool = False,
        timeout: float = 600.0,
        summary_only: bool = False,
    ) -> Evaluation:
        """Evaluate a stored set of a run and return the result.

        Args:
            evaluation_set: name of the set.
            prompts: stored as that set first, if given; the same prompts may be given again.
            policy_version: generate all tokens with this version. If weights are updated before the evaluation is
                done, the remaining prompts cannot be answered and it times out. By default each prompt is answered
                with the weights that are live at the time; the result has the range of versions.
            hold: pause training between two steps until it is done, so that all tokens are of one version.
        """
        if hold and policy_version is not None:
            raise InputError(
                "hold: got a policy_version as well; allowed: hold, which takes the trainer's, or a version"
            )
        if prompts is not None:
            parsed = parse_prompts(prompts)
            ids = [f"{evaluation_set}/{index}" for index in range(len(parsed))]
            await self.submit(
                run_id, parsed, purpose="evaluate", evaluation_set=evaluation_set, instance_ids=ids, timeout=timeout
            )
        if hold:
            async with held(self.connections, timeout) as version:
                return await evaluate_run(self.connections, run_id, evaluation_set, version, "", timeout, summary_only)
        live = "" if policy_version is not None else secrets.token_hex(4)
        # A broker of an earlier release ignores `live` and evaluates this version.
        version = policy_version if policy_version is not None else (await self.get_run(run_id)).policy_version
        return await evaluate_run(self.connections, run_id, evaluation_set, version, live, timeout, summary_only)

    # Control; an empty run_id is the run of the trainer, whichever it is

    async def pause(self, run_id: str = "", *, limit: float = 0.0, reason: str = "", timeout: float = 600.0) -> int:
        """Pause the trainer after the step in progress, for at most `limit` seconds (0: until `resume`).

        Return the steps done when that step is, within `timeout` seconds.
        """
        trainer, request = self._trainer, trainer_pb2.PauseRequest(reason=reason, limit=to_duration(limit))
        async with deadline(f"the end of the step in progress at the trainer at {trainer.address}", timeout):
            status = await trainer_status(self.connections, run_id)
            step = (await trainer.call(trainer.stub.Pause, request)).step
            if status.step < step:
                await until_reported(self.connections, step - 2)
        return step

    async def resume(self, run_id: str = "") -> int:
        """End the trainer's pause and return the steps done."""
        await trainer_status(self.connections, run_id)
        return (await self._trainer.call(self._trainer.stub.Resume, trainer_pb2.ResumeRequest())).step

    async def checkpoint(self, run_id: str = "", timeout: float = 600.0) -> Checkpoint:
        """Have the trainer save a checkpoint after the step in progress, and return it when it is durable."""
        await trainer_status(self.connections, run_id)
        request = trainer_pb2.SaveCheckpointRequest()
        answer = await self._trainer.call(self._trainer.stub.SaveCheckpoint, request, timeout)
        return Checkpoint.from_proto(answer.checkpoint)

    async def stop(self, run_id: str = "", *, reason: str = "", timeout: float = 600.0) -> int:
        """Stop the trainer after the step in progress and its checkpoint; return the committed steps when it has ended.

        The run stays active: a trainer started again continues it.
        """
        async with deadline(f"the end of the trainer at {self._trainer.address}", timeout):
            run_id = (await trainer_status(self.connections, run_id)).run_id
            await self._trainer.call(self._trainer.stub.Stop, trainer_pb2.StopRequest(reason=reason))
            await until_reported(self.connections)
        return (await self.get_run(run_id)).committed_step

    async def drain(self, rollout: str, *, grace: float = 60.0, undo: bool = False, timeout: float = 30.0) -> Drained:
        """Take a rollout out of its run, and return when it has left; its process stays, so that `undo` brings it back.

        Args:
            rollout: its address, or its instance id as a member of an active run.
            grace: seconds in which it finishes groups that have begun; the others' prompts are given back.
            timeout: seconds for the answer after the grace.
        """
        service = self.connections.rollout_at(rollout if ":" in rollout else await self._address_of(rollout))
        request = rollout_pb2.SetDrainRequest(draining=not undo, grace=to_duration(grace))
        async with deadline(f"the answer of the rollout at {service.address}", grace + timeout):
            answer = await service.call(service.stub.SetDrain, request, grace + timeout)
        return Drained.from_proto(answer, address=service.address)

    async def _address_of(self, rollout: str) -> str:
        runs = [await self.get_run(run.run_id) for run in await self.list_runs() if run.active]
        known = {one.instance_id: one.address for run in runs for one in run.members if one.kind == "rollout"}
        if rollout not in known:
            named = ", ".join(f"{name} at {address}" for name, address in known.items()) or "which there is none"
            raise InputError(f"'{rollout}' is no rollout of an active run; allowed: an address, or one of {named}")
        return known[rollout]

    # Monitoring

    def watch(self, run_id: str, after: str = "") -> AsyncGenerator[RunEvent, None]:
        """Yield the run's stored events after the event `after`, then new ones until the run has ended.

        Args:
            after: an event id; "" for all stored events, "$" for new ones only.
        """
        return watch_run(self.connections, run_id, after)

    async def status(self) -> list[ServiceStatus]:
        """Return the status of the services, and of the other rollouts of the newest run.

        For a service that cannot be reached nothing is raised: its status has the error.
        """
        return await service_statuses(self.connections)

    async def get_service(self, kind: str) -> ServiceStatus:
        """Return the status of one service, "broker", "reward", "rollout", "trainer" or "environment"."""
        if kind not in ALL_KINDS:
            raise InputError(f"kind: got '{kind}'; allowed: {', '.join(ALL_KINDS)}")
        return await service_status(self.connections, kind)

    async def list_dead(
        self, run_id: str, limit: int = 100, instance_ids: Sequence[str] = ()
    ) -> tuple[list[DeadPrompt], int]:
        """Return the dead prompts, oldest first, and their total number.

        Args:
            limit: most to return.
            instance_ids: only these, at most 1024; those that are not dead are left out.
        """
        request = broker_pb2.ListDeadRequest(run_id=run_id, limit=limit, instance_ids=instance_ids)
        found: list[DeadPrompt] = []
        while True:
            answer = await self._broker.call(self._broker.stub.ListDead, request)
            found += (DeadPrompt.from_proto(dead) for dead in answer.dead)
            if not answer.next_page_token or len(found) >= limit:
                return found, answer.total
            request.page_token, request.limit = answer.next_page_token, limit - len(found)

    async def get_unscored(self, handle: Handle) -> Group:
        """Return the stored completions of a dead prompt whose verifier failed, with the scores that it has."""
        request = broker_pb2.GetUnscoredRequest(run_id=handle.run_id, instance_id=handle.instance_id)
        answer = await self._broker.call(self._broker.stub.GetUnscored, request)
        kept = experience_pb2.UnscoredGroup.FromString(answer.unscored)
        return Group.from_transcript(handle.run_id, kept.group.transcript)

    async def requeue_dead(self, run_id: str, instance_ids: Sequence[str] = ()) -> int:
        """Put dead prompts back into the queue (all, if none is named) and return their number.

        Stored completions are scored; the others are generated again.
        """
        request = broker_pb2.RequeueDeadRequest(run_id=run_id, instance_ids=instance_ids)
        return (await self._broker.call(self._broker.stub.RequeueDead, request)).requeued

    async def get_group(self, handle: Handle) -> GroupPlace:
        """Return the state of a prompt instance at the broker."""
        request = broker_pb2.GetGroupRequest(run_id=handle.run_id, instance_id=handle.instance_id)
        return GroupPlace.from_proto(await self._broker.call(self._broker.stub.GetGroup, request))

    async def get_history(self, handle: Handle) -> GroupHistory:
        """Return the history of a prompt instance, from its submission to the weights that were trained on it."""
        return await group_history(self.connections, handle)
