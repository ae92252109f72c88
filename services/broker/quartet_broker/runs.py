"""Runs: CreateRun, GetRun, ListRuns, FinishRun, DeleteRun; the checks and defaults of a specification."""

import asyncio
import math
import time

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import keys, scripts, validation
from quartet_broker.config import BrokerSection
from quartet_broker.errors import over_share, run_not_found
from quartet_broker.events import state_event, timestamp
from quartet_broker.members import Members
from quartet_broker.metrics import forget_run
from quartet_broker.store import Store, Value
from quartet_broker.streams import fill_page, read_page_token
from quartet_common import identity
from quartet_common.config import CurriculumSection, RunSection
from quartet_common.durations import to_seconds
from quartet_common.errors import (
    aborted,
    already_exists,
    failed_precondition,
    invalid_argument,
    resource_exhausted,
)
from quartet_common.log import get_logger
from quartet_common.run_spec import curriculum_spec, environment_spec, run_spec
from quartet_common.sampling import SamplingSection, given, to_message
from quartet_common.sections import EnvironmentSection

_LONGEST_SECONDS = 366 * 86400.0


def _run_file_defaults() -> broker_pb2.RunSpec:
    defaults = run_spec(RunSection())
    # The defaults of these depend on other fields: see `with_defaults` and the comments of the contract.
    for field in ("run_id", "verifiers", "evaluation_sampling"):
        defaults.ClearField(field)
    defaults.sampling.CopyFrom(to_message(SamplingSection()))
    defaults.sampling.ClearField("max_new_tokens")
    return defaults


_DEFAULTS = _run_file_defaults()
_ENVIRONMENT = environment_spec(EnvironmentSection())
_SERVED_ENVIRONMENT = environment_spec(EnvironmentSection(served=True))
_CURRICULUM = curriculum_spec(CurriculumSection())


def with_defaults(given: broker_pb2.RunSpec) -> broker_pb2.RunSpec:
    """Return a copy of a specification in which every unset field has its default.

    The defaults are those of the run file, including keys that are new in this release: a run that an earlier release
    made compares equal to what the same run file asks for today.
    """
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(given)
    _fill(spec, _DEFAULTS)
    spec.sampling.n = spec.sampling.n or spec.group_size
    spec.evaluation_sampling.n = spec.evaluation_sampling.n or 1
    _fill(spec.evaluation_sampling, spec.sampling)
    if spec.HasField("environment"):
        _fill(spec.environment, _SERVED_ENVIRONMENT if spec.environment.served else _ENVIRONMENT)
    if spec.HasField("temperature_schedule"):
        spec.temperature_schedule.curve = spec.temperature_schedule.curve or experience_pb2.TEMPERATURE_CURVE_STEP
    if spec.HasField("curriculum"):
        _fill(spec.curriculum, _CURRICULUM)
    for verifier in spec.verifiers:
        verifier.weight = verifier.weight or 1.0
    return spec


def _fill(message: Message, defaults: Message) -> None:
    """Set a message's unset fields to their defaults. Empty fields, and 0 in fields without presence, are unset."""
    for field, default in defaults.ListFields():
        value = getattr(message, field.name)
        if field.message_type is None and not field.is_repeated:
            if not (message.HasField(field.name) if field.has_presence else value):
                setattr(message, field.name, default)
        elif field.is_repeated:
            if not value:
                value.MergeFrom(default)
        elif value == type(value)():
            value.CopyFrom(default)
        elif not isinstance(value, Duration):
            _fill(value, default)


def complete(given: broker_pb2.RunSpec) -> broker_pb2.RunSpec:
    """Return the specification with defaults filled in. Raises INVALID_ARGUMENT naming the field."""
    spec = with_defaults(given)
    validation.name("spec.run_id", spec.run_id)
    validation.integer("spec.group_size", spec.group_size, 1, 1024)
    validation.integer("spec.groups_per_step", spec.groups_per_step, 1, validation.MOST_IDS)
    validation.integer("spec.max_deliveries", spec.max_deliveries, 1, 1 << 20)
    for field in ("max_queued_prompts", "max_experience_bytes"):
        validation.integer(f"spec.{field}", getattr(spec, field), 1)
    for field in ("max_staleness", "max_steps", "max_prompt_tokens"):
        validation.integer(f"spec.{field}", getattr(spec, field), 0)
    _check_choice(broker_pb2.LeaseOrder, "lease_order", spec.lease_order)
    _check_choice(broker_pb2.PartialBatchPolicy, "partial_batch", spec.partial_batch)
    _check_choice(broker_pb2.LongPromptPolicy, "long_prompts", spec.long_prompts)
    for field in ("prompt_lease_ttl", "member_ttl", "result_ttl"):
        seconds = validation.in_seconds(f"spec.{field}", getattr(spec, field))
        if not 0.001 <= seconds <= _LONGEST_SECONDS:
            raise invalid_argument(f"spec.{field}", came=f"{seconds:g} s", allowed="1 ms to 366 days")
    validation.sampling("spec.sampling", spec.sampling)
    validation.sampling("spec.evaluation_sampling", spec.evaluation_sampling)
    validation.environment("spec.environment", spec.environment)
    if spec.HasField("temperature_schedule"):
        validation.temperature_schedule("spec.temperature_schedule", spec.temperature_schedule)
    if spec.HasField("curriculum"):
        validation.curriculum("spec.curriculum", spec.curriculum)
    validation.verifiers("spec.verifiers", spec.verifiers)
    return spec


def _check_choice(kind, field: str, value: int) -> None:
    if value not in kind.values():
        raise invalid_argument(f"spec.{field}", came=value, allowed=", ".join(kind.keys()[1:]))


def first_difference(stands: broker_pb2.RunSpec, asked: broker_pb2.RunSpec) -> str | None:
    """Describe the first field in which two specifications differ, or return None. Unset fields have their defaults."""
    stands, asked = with_defaults(stands), with_defaults(asked)
    for field in broker_pb2.RunSpec.DESCRIPTOR.fields:
        old, new = getattr(stands, field.name), getattr(asked, field.name)
        if old != new:
            if isinstance(old, experience_pb2.SamplingParams):  # too long to be shown whole
                both = given(old), given(new)
                old, new = (
                    {name: value for name, value in one.items() if other.get(name) != value}
                    for one, other in (both, both[::-1])
                )
            return f"{field.name} is {_short(old)}, asked for {_short(new)}"
    return None


def _short(value: object) -> str:
    text = " ".join(str(value).split()) or "empty"
    return text if len(text) <= 120 else text[:117] + "..."


def script_fields(spec: broker_pb2.RunSpec, section: BrokerSection) -> list[Value]:
    """Return field, value, ... of the run's hash: the settings that the scripts read."""
    fields: dict[str, Value] = {
        "groups_per_step": spec.groups_per_step,
        "wanted": spec.groups_per_step,
        "max_staleness": spec.max_staleness,
        "lease_order": broker_pb2.LeaseOrder.Name(spec.lease_order).removeprefix("LEASE_ORDER_"),
        "partial_batch": broker_pb2.PartialBatchPolicy.Name(spec.partial_batch).removeprefix("PARTIAL_BATCH_POLICY_"),
        "max_deliveries": spec.max_deliveries,
        "max_queued_prompts": spec.max_queued_prompts,
        "max_experience_bytes": spec.max_experience_bytes,
        "prompt_lease_ttl_ms": _milliseconds(spec.prompt_lease_ttl),
        "member_ttl_ms": _milliseconds(spec.member_ttl),
        "result_ttl_ms": _milliseconds(spec.result_ttl),
        "max_result_bytes": section.max_result_bytes,
        "max_event_bytes": section.max_event_bytes,
        "max_evaluation_bytes": section.max_evaluation_bytes,
        "max_prompt_bytes": section.max_prompt_bytes,
        "caller_share": section.max_caller_share,
        "max_first_dead": section.max_first_dead,
        "remembered": section.remembered_instances,
        "remembered_lives": section.remembered_lives,
    }
    if spec.HasField("curriculum"):
        fields |= {
            "curriculum_by": broker_pb2.CurriculumUnit.Name(spec.curriculum.by).removeprefix("CURRICULUM_UNIT_"),
            "curriculum_window": spec.curriculum.window,
            "solved_above": spec.curriculum.solved_above,
            "hopeless_below": spec.curriculum.hopeless_below,
            "floor": spec.curriculum.floor,
        }
    return [part for item in fields.items() for part in item]


def _milliseconds(duration: Duration) -> int:
    return round(to_seconds(duration) * 1000)


log = get_logger(__name__)

_STATS = [field.name for field in broker_pb2.RunStats.DESCRIPTOR.fields if field.name != "dead"]
_END_STATES = (broker_pb2.RUN_STATE_SUCCEEDED, broker_pb2.RUN_STATE_FAILED, broker_pb2.RUN_STATE_CANCELLED)
# Maximum keys that DeleteRun scans itself, in about a second; if there are more, the sweeper scans them.
_SCANNED_AT_ONCE = 1_000_000
_LISTED_AT_ONCE = 64
_RUN_FIELDS = (
    *("state", "reason", "spec", "created", "policy_version", "committed_step", "prompts_ended", "ending"),
    *("made_by", "trained_by", "newest_pass"),
)


def state_name(state: broker_pb2.RunState) -> str:
    """Return a run's state as Redis keeps it, e.g. "ACTIVE"."""
    return broker_pb2.RunState.Name(state).removeprefix("RUN_STATE_")


def state_value(name: bytes) -> broker_pb2.RunState:
    """Return a run's state from Redis."""
    return broker_pb2.RunState.Value(f"RUN_STATE_{name.decode()}")


class Runs:
    """Makes, shows, ends and removes runs."""

    def __init__(self, store: Store, members: Members, section: BrokerSection, answer_bytes: int):
        self._store = store
        self._members = members
        self._section = section
        self._answer_bytes = answer_bytes

    async def create(self, request: broker_pb2.CreateRunRequest) -> broker_pb2.CreateRunResponse:
        """Make the run, or confirm that it exists with the same specification; with `extend`, continue it."""
        spec = complete(request.spec)
        event, made_by = state_event(broker_pb2.RUN_STATE_ACTIVE), identity.caller()
        await self._check_room(spec.run_id)
        # Listed before it is made, so that every run is listed. ListRuns leaves out ids without a run.
        await self._store.read([("ZADD", keys.RUNS, "NX", time.time() * 1000, spec.run_id)])
        reply = await self._store.run(
            scripts.CREATE_RUN,
            spec.run_id,
            validation.stored("spec", spec),
            event,
            *("made_by", made_by.name if made_by else ""),
            *script_fields(spec, self._section),
        )
        if reply[0] == b"DELETING":
            raise aborted(f"run '{spec.run_id}'", "a run of this name is being deleted; retry")
        if reply[0] == b"EXISTS":
            stands = broker_pb2.RunSpec.FromString(reply[1])
            if request.extend and (spec.max_steps or math.inf) >= (stands.max_steps or math.inf):
                stands.max_steps = spec.max_steps
            difference = first_difference(stands, spec)
            if difference:
                raise already_exists("run", spec.run_id, difference)
            if request.extend:
                await self._extend(spec, reply[1])
        else:
            log.info("run made", extra={"run": spec.run_id})
            await self.list_again(spec.run_id)  # the end of a deletion may have removed it from the list meanwhile
        return broker_pb2.CreateRunResponse(run=await self.load(spec.run_id), created=reply[0] == b"OK")

    async def _extend(self, spec: broker_pb2.RunSpec, stands: bytes) -> None:
        steps = f"to step {spec.max_steps}" if spec.max_steps else "to the end of the prompts"
        event = state_event(broker_pb2.RUN_STATE_ACTIVE, f"extended {steps}")
        word, *state = await self._store.run(scripts.EXTEND_RUN, spec.run_id, stands, spec.SerializeToString(), event)
        if word == b"CHANGED":
            raise aborted(f"run '{spec.run_id}'", "its specification was changed meanwhile; retry")
        if word == b"OVER":
            raise failed_precondition(
                f"run '{spec.run_id}'", f"it has {state[0].decode().lower()}; only a run that succeeded goes on"
            )
        log.info("run goes on", extra={"run": spec.run_id, "max_steps": spec.max_steps})

    async def _check_room(self, run_id: str) -> None:
        listed, runs = await self._store.read([("ZSCORE", keys.RUNS, run_id), ("ZCARD", keys.RUNS)])
        if listed is not None:
            return
        if runs >= self._section.max_runs:
            raise resource_exhausted(
                "runs", f"there are {runs} and at most {self._section.max_runs} may be (broker.max_runs); delete some"
            )
        most = int(self._section.max_caller_share * self._section.max_runs)
        if (name := validation.owner()) and runs >= most:  # with fewer runs nobody can exceed the share
            makers = await self._store.read([("HGET", keys.run(run_id), "made_by") for run_id in await self.ids()])
            if (made := makers.count(name.encode())) >= most:
                raise over_share("runs", made, most)

    async def load(self, run_id: str) -> broker_pb2.Run:
        """Return a run as it stands. Raises NOT_FOUND."""
        (run,) = await self._load_all([run_id])
        if run is None:
            raise run_not_found(run_id)
        return run

    async def _load_all(self, run_ids: list[str]) -> list[broker_pb2.Run | None]:
        commands: list[tuple] = []
        for run_id in run_ids:
            commands.append(("HMGET", keys.run(run_id), *_RUN_FIELDS))
            commands.append(("HMGET", keys.prefix(run_id) + "stats", *_STATS))
            commands.append(("ZCARD", keys.prefix(run_id) + "dead"))
            commands.append(("HGETALL", keys.prefix(run_id) + "sources"))
        replies = await self._store.read(commands)
        return [_run(*replies[n : n + 4]) for n in range(0, len(replies), 4)]

    async def get(self, request: broker_pb2.GetRunRequest) -> broker_pb2.GetRunResponse:
        """Return a run and its live members."""
        run_id = validation.name("run_id", request.run_id)
        (_, members), run = await asyncio.gather(self._members.alive(run_id), self.load(run_id))
        return broker_pb2.GetRunResponse(run=run, members=members)

    async def list_page(self, request: broker_pb2.ListRunsRequest) -> broker_pb2.ListRunsResponse:
        """Return runs, newest first."""
        limit = validation.integer("limit", request.limit, 0) or validation.MAX_INTEGER
        behind = read_page_token(request.page_token)
        (listed,) = await self._store.read([("ZREVRANGE", keys.RUNS, 0, -1, "WITHSCORES")])
        entries = [(float(created), run_id.decode()) for run_id, created in listed]
        if behind is not None:
            entries = [entry for entry in entries if entry < behind]
        runs, token = await fill_page(entries, self._load_all, _LISTED_AT_ONCE, self._answer_bytes, limit)
        return broker_pb2.ListRunsResponse(runs=runs, next_page_token=token)

    async def ids(self) -> list[str]:
        """Return the ids of all runs, newest first."""
        (ids,) = await self._store.read([("ZREVRANGE", keys.RUNS, 0, -1)])
        return [run_id.decode() for run_id in ids]

    async def finish(self, request: broker_pb2.FinishRunRequest) -> broker_pb2.FinishRunResponse:
        """End a run; its first outcome stands."""
        run_id = validation.name("run_id", request.run_id)
        if request.state not in _END_STATES:
            raise invalid_argument("state", came=request.state, allowed="SUCCEEDED, FAILED or CANCELLED")
        reason = validation.reason(request.reason)
        event = state_event(request.state, reason)
        validation.version("committed_step", request.committed_step)
        arguments = (state_name(request.state), reason, event, request.ending, request.committed_step)
        word, *committed = await self._store.run(scripts.FINISH_RUN, run_id, *arguments)
        if word == b"BEHIND":
            raise failed_precondition(
                f"run '{run_id}'",
                f"its books end at step {int(committed[0])}, and it ends at step {request.committed_step}: Redis was "
                "restored from an earlier state; open a session with the newest checkpoint",
            )
        log.info("run finished", extra={"run": run_id, "state": state_name(request.state)})
        return broker_pb2.FinishRunResponse(run=await self.load(run_id))

    async def end_hopeless(self, run_id: str, why: bytes) -> None:
        """End a run as failed if a script returned a reason `why` it is hopeless; "" does nothing."""
        if not why:
            return
        reason = why.decode(errors="replace")
        log.warning("the run is ended: %s", reason, extra={"run": run_id})
        state, ending = broker_pb2.RUN_STATE_FAILED, broker_pb2.RUN_ENDING_DEAD_PROMPTS
        with identity.of_the_service():
            await self.finish(broker_pb2.FinishRunRequest(run_id=run_id, state=state, reason=reason, ending=ending))

    async def delete(self, request: broker_pb2.DeleteRunRequest) -> broker_pb2.DeleteRunResponse:
        """Remove a finished run and all its data."""
        run_id = validation.name("run_id", request.run_id)
        return broker_pb2.DeleteRunResponse(deleted=await self._delete(run_id, request.force))

    async def delete_ended(self, run_id: str, ended: int) -> None:
        """Remove a run that ended at `ended`, in milliseconds of Redis' clock; not a newer one of the same name."""
        if await self._delete(run_id, ended=str(ended)):
            log.info("its time after the end is over", extra={"run": run_id})

    async def _delete(self, run_id: str, force: bool = False, ended: str = "") -> bool:
        arguments = ("1" if force else "0", ended)
        (reply,) = await self._store.run_many(scripts.DELETE_RUN, run_id, [arguments], missing_ok=True)
        if reply[0] == b"NOT_FOUND":
            return False
        if reply[0] == b"ACTIVE":
            raise failed_precondition(f"run '{run_id}'", "it is active: finish it first, or set force")
        await self.purge(run_id, most_keys=_SCANNED_AT_ONCE)
        forget_run(run_id)
        log.info("run deleted", extra={"run": run_id})
        return True

    async def is_being_deleted(self, run_id: str) -> bool:
        """Return whether a deletion is incomplete: the broker died, or there were too many keys to scan."""
        (state,) = await self._store.read([("HGET", keys.run(run_id), "state")])
        return state == b"DELETING"

    async def purge(self, run_id: str, most_keys: int | None = None) -> None:
        """Remove the rest of a run that is being deleted. Several brokers may do this at the same time.

        First what the run's lists name, then what a scan finds. The scan is left to the sweeper if Redis has more than
        `most_keys` keys. The run's own hash is removed last, since it marks the deletion as incomplete.
        """
        left = 1
        while left:
            (reply,) = await self._store.run_many(scripts.DELETE_PORTION, run_id, [()], missing_ok=True)
            left = reply[1] if reply[0] == b"OK" else 0
        with self._store.failures():
            server = await self._store.client(run_id)
            if most_keys is not None and await server.dbsize() > most_keys:
                return
            server_run_id = (await server.info("server"))["run_id"]
        async for found in self._store.scan(run_id):
            rest = [key for key in found if key != keys.run(run_id).encode()]
            if rest:
                await self._store.run_many(scripts.DELETE_KEYS, run_id, [rest], missing_ok=True)
        with self._store.failures():
            if (await server.info("server"))["run_id"] != server_run_id:
                return  # Redis restarted during the scan, which may have missed keys
        await self._store.run_many(scripts.DELETE_KEYS, run_id, [[keys.run(run_id)]], missing_ok=True)
        await self._store.read([("ZREM", keys.RUNS, run_id)])
        await self.list_again(run_id)  # it may have been recreated meanwhile

    async def list_again(self, run_id: str) -> bool:
        """Put a run on the list if it exists; return whether it does. A Cluster may lose an entry but not its run."""
        (fields,) = await self._store.read([("HMGET", keys.run(run_id), "state", "created")])
        state, created = fields
        if state is None or state == b"DELETING":
            return False
        await self._store.read([("ZADD", keys.RUNS, "NX", created, run_id)])
        return True


def _run(
    fields: list[bytes | None], stats: list[bytes | None], dead: int, sources: dict[bytes, bytes]
) -> broker_pb2.Run | None:
    state, reason, spec, created, version, committed, ended, ending, made_by, trained_by, newest_pass = fields
    if state is None or state == b"DELETING":
        return None
    assert reason is not None and spec is not None and created is not None
    counts = {name: int(value or 0) for name, value in zip(_STATS, stats, strict=True)}
    return broker_pb2.Run(
        spec=broker_pb2.RunSpec.FromString(spec),
        state=state_value(state),
        reason=reason.decode(),
        created_at=timestamp(float(created)),
        policy_version=int(version or 0),
        committed_step=int(committed or 0),
        prompts_ended=ended == b"1",
        ending=int(ending or 0),
        made_by=(made_by or b"").decode(),
        trained_by=(trained_by or b"").decode(),
        newest_data_pass=int(newest_pass or 0),
        stats=broker_pb2.RunStats(dead=dead, **counts),
        sources=_sources(sources),
    )


def _sources(fields: dict[bytes, bytes]) -> list[broker_pb2.SourceStats]:
    found: dict[str, broker_pb2.SourceStats] = {}
    for field, value in fields.items():
        count, _, name = field.decode().partition(" ")
        stats = found.setdefault(name, broker_pb2.SourceStats(name=name))
        setattr(stats, count, float(value) if count == "accuracy" else int(value))
    return [found[name] for name in sorted(found)]
