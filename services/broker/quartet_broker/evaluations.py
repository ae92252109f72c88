"""Evaluations of a stored prompt set, at one policy version or of the live policy: StartEvaluation, GetEvaluation."""

import grpc
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys, validation
from quartet_broker.notifier import Notifier
from quartet_broker.prompts import content_of, digest, overflow
from quartet_broker.store import Store, Value
from quartet_common.errors import already_exists, not_found, resource_exhausted


class Evaluations:
    """Queues evaluations and gathers what came of them."""

    def __init__(self, store: Store, notifier: Notifier, answer_bytes: int):
        self._store = store
        self._notifier = notifier
        self._answer_bytes = answer_bytes

    async def start(self, request: broker_pb2.StartEvaluationRequest) -> broker_pb2.StartEvaluationResponse:
        """Queue a stored set, pinned to a policy version or for whichever is live."""
        run_id = validation.name("run_id", request.run_id)
        evaluation_set = validation.name("evaluation_set", request.evaluation_set)
        version = validation.version("policy_version", request.policy_version)
        at = f"live-{validation.name('live', request.live)}" if request.live else str(version)
        evaluation_id = f"{evaluation_set}@{at}"
        arguments: list[Value] = [evaluation_id, "" if request.live else version]
        for stored in await self._stored(run_id, evaluation_set):
            instance = experience_pb2.PromptInstance.FromString(stored)
            instance.instance_id = f"{instance.instance_id}@{at}"
            instance.evaluation_id = evaluation_id
            if not request.live:
                instance.pinned_version = version
            arguments += [instance.instance_id, digest(content_of(instance)), instance.SerializeToString()]
        if len(arguments) == 2:
            # Also of a run that does not exist: tell that first.
            await self._store.run("list_members", run_id)
            raise not_found("evaluation set", evaluation_set, "submit its prompts with PURPOSE_EVALUATE")
        reply = await self._store.run("start_evaluation", run_id, *arguments)
        if reply[0] == b"OVERFLOW":
            raise overflow(run_id, reply)
        if reply[0] == b"CONFLICT":
            raise already_exists("prompt instance", reply[1].decode(), "an evaluation needs this id for its own")
        return broker_pb2.StartEvaluationResponse(evaluation_id=evaluation_id, prompts=int(reply[1]))

    async def _stored(self, run_id: str, evaluation_set: str) -> list[bytes]:
        prefix = keys.prefix(run_id)
        (ids,) = await self._store.read([("LRANGE", f"{prefix}set:{evaluation_set}", 0, -1)])
        if not ids:
            return []
        return await self._store.read(("HGET", f"{prefix}i:{name.decode()}", "prompt") for name in ids)

    async def get(
        self, request: broker_pb2.GetEvaluationRequest, context: grpc.aio.ServicerContext
    ) -> broker_pb2.GetEvaluationResponse:
        """Return an evaluation's results, waiting until it is complete."""
        run_id = validation.name("run_id", request.run_id)
        until = validation.deadline("wait", request.wait, context)
        key = f"{keys.prefix(run_id)}evaluation:{request.evaluation_id}"
        with self._notifier.waiter(run_id, "evaluations") as waiter:
            while True:
                waiter.clear()
                (prompts, dead), finished = await self._store.read(
                    [("HMGET", key, "prompts", "dead"), ("LLEN", f"{key}:finished")]
                )
                if prompts is None:
                    await self._store.run("list_members", run_id)  # the run's absence is the greater news
                    raise not_found(
                        "evaluation",
                        request.evaluation_id,
                        "it was not started (StartEvaluation), or newer ones fill broker.max_evaluation_bytes",
                    )
                complete = finished + int(dead) >= int(prompts)
                if complete or not await waiter.wait(until):
                    break
        response = broker_pb2.GetEvaluationResponse(
            complete=complete, prompts=int(prompts), finished=finished, dead=int(dead)
        )
        await self._add_results(run_id, key, response, request.summary_only)
        return response

    async def _add_results(
        self, run_id: str, key: str, response: broker_pb2.GetEvaluationResponse, summary_only: bool
    ) -> None:
        (ids,) = await self._store.read([("LRANGE", f"{key}:finished", 0, response.finished - 1)])
        if not ids:
            return
        (headers,) = await self._store.read([("HMGET", f"{key}:headers", *ids)])
        response.headers.extend(experience_pb2.GroupHeader.FromString(header) for header in headers)
        if summary_only:
            return
        result_keys = [f"{keys.prefix(run_id)}result:{name.decode()}" for name in ids]
        total = sum(await self._store.read(("STRLEN", result) for result in result_keys))
        if total > self._answer_bytes:
            raise resource_exhausted(
                f"evaluation '{key.rpartition(':')[2]}'",
                f"its transcripts have {total} bytes and an answer at most {self._answer_bytes}: ask with summary_only "
                "and fetch the transcripts with CollectResults",
            )
        (transcripts,) = await self._store.read([("MGET", *result_keys)])
        # A transcript that was let go (RunSpec.result_ttl) keeps its place, empty.
        response.transcripts.extend(transcript or b"" for transcript in transcripts)
