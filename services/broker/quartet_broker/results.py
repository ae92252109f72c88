"""CollectResults: transcripts of finished groups for whoever submitted the prompts."""

from collections.abc import AsyncGenerator

from quartet.v1 import broker_pb2

from quartet_broker import keys, validation
from quartet_broker.dead_letters import DeadLetters
from quartet_broker.notifier import Notifier
from quartet_broker.store import Store
from quartet_common.errors import failed_precondition, not_found, unavailable

_PAGE = 512
_WINDOW = 16


class Results:
    """Streams results by instance id, in order of completion, each once."""

    def __init__(self, store: Store, notifier: Notifier, dead: DeadLetters):
        self._store = store
        self._notifier = notifier
        self._dead = dead

    async def collect(
        self, request: broker_pb2.CollectResultsRequest
    ) -> AsyncGenerator[broker_pb2.CollectResultsResponse]:
        """Yield each instance's transcript or death; end when all were answered."""
        run_id = validation.name("run_id", request.run_id)
        validation.count("instance_ids", request.instance_ids, 65536)
        left = set(request.instance_ids)
        look = set(left)
        with self._notifier.waiter(run_id, "result") as waiter:
            while True:
                waiter.clear()
                waiter.details.clear()
                waiter.missed = False
                finished = await self._is_finished(run_id)
                for instance_id, is_dead in await self._done(run_id, sorted(look)):
                    response = await self._result(run_id, instance_id, is_dead)
                    if response is not None:
                        yield response
                        left.discard(instance_id)
                if not left:
                    return
                if finished:
                    description = f"it is finished; {len(left)} of the instances will not be answered"
                    raise failed_precondition(f"run '{run_id}'", description)
                if not await waiter.wait():
                    raise unavailable("broker", "it is stopping; collect again what is missing")
                # The notifier names what was finished; after a broken subscription, or at the run's end, query all.
                finished = await self._is_finished(run_id)
                look = set(left) if waiter.missed or finished else left & waiter.details

    async def _is_finished(self, run_id: str) -> bool:
        (state,) = await self._store.read([("HGET", keys.run(run_id), "state")])
        return state != b"ACTIVE"

    async def _done(self, run_id: str, instance_ids: list[str]) -> list[tuple[str, bool]]:
        """Return (id, is dead) of those that are done, in order of completion. Raises NOT_FOUND for an unknown one."""
        done: list[tuple[float, str, bool]] = []
        for start in range(0, len(instance_ids), _PAGE):
            page = instance_ids[start : start + _PAGE]
            reply = await self._store.run("list_outcomes", run_id, *page)
            for instance_id, outcome, at in zip(page, reply[1::2], reply[2::2], strict=True):
                match outcome:
                    case b"DONE" | b"DEAD":
                        done.append((float(at), instance_id, outcome == b"DEAD"))
                    case b"GONE":
                        raise not_found("result", instance_id, "it was let go; see RunSpec.result_ttl")
                    case b"STORED":
                        hint = "it is of an evaluation set; results have the ids '{instance_id}@{version}'"
                        raise not_found("result", instance_id, hint)
                    case b"UNKNOWN":
                        raise not_found("prompt instance", instance_id, "submit it first")
        return [(instance_id, is_dead) for _, instance_id, is_dead in sorted(done)]

    async def _result(self, run_id: str, instance_id: str, is_dead: bool) -> broker_pb2.CollectResultsResponse | None:
        if is_dead:
            (dead,) = await self._dead.load(run_id, [instance_id])
            return broker_pb2.CollectResultsResponse(instance_id=instance_id, dead=dead) if dead else None
        prefix = keys.prefix(run_id)
        stored, kept = await self._store.read(
            [("HGET", f"{prefix}i:{instance_id}", "stored"), ("GET", f"{prefix}result:{instance_id}")]
        )
        transcript = kept
        if stored is not None:  # of a group that is on its way to the weights
            (transcript,) = await self._store.read([("GET", f"{prefix}transcript:{stored.decode()}")])
        if transcript is None:
            return None  # it was requeued as stale since: it will be finished again
        return broker_pb2.CollectResultsResponse(instance_id=instance_id, transcript=transcript)
