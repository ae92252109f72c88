"""A run's specification: its checks, its defaults, and what of it the scripts need."""

from google.protobuf.duration_pb2 import Duration
from quartet.v1 import broker_pb2

from quartet_broker import validation
from quartet_broker.config import BrokerSection
from quartet_broker.store import Value
from quartet_common.durations import to_duration, to_seconds
from quartet_common.errors import invalid_argument

_LONGEST_SECONDS = 366 * 86400.0


def complete(given: broker_pb2.RunSpec) -> broker_pb2.RunSpec:
    """Return the specification with defaults filled in. Raises INVALID_ARGUMENT naming the field."""
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(given)
    validation.name("spec.run_id", spec.run_id)
    _default(spec, "group_size", 8, most=1024)
    _default(spec, "groups_per_step", 16, most=1 << 20)
    _default(spec, "max_deliveries", 5, most=1 << 20)
    _default(spec, "max_queued_prompts", 4096)
    _default(spec, "max_experience_bytes", 1 << 30)
    if not spec.HasField("max_staleness"):
        spec.max_staleness = 4
    validation.integer("spec.max_staleness", spec.max_staleness, 0)
    validation.integer("spec.max_steps", spec.max_steps, 0)
    validation.integer("spec.max_prompt_tokens", spec.max_prompt_tokens, 0)
    spec.lease_order = _choice(broker_pb2.LeaseOrder, "lease_order", spec.lease_order, broker_pb2.LEASE_ORDER_FIFO)
    spec.partial_batch = _choice(
        broker_pb2.PartialBatchPolicy, "partial_batch", spec.partial_batch, broker_pb2.PARTIAL_BATCH_POLICY_DROP
    )
    spec.long_prompts = _choice(
        broker_pb2.LongPromptPolicy, "long_prompts", spec.long_prompts, broker_pb2.LONG_PROMPT_POLICY_REFUSE
    )
    for field, seconds in (("prompt_lease_ttl", 60.0), ("member_ttl", 15.0), ("result_ttl", 3600.0)):
        _default_duration(spec, field, seconds)
    validation.sampling("spec.sampling", spec.sampling)
    validation.sampling("spec.evaluation_sampling", spec.evaluation_sampling)
    spec.sampling.n = spec.sampling.n or spec.group_size
    spec.evaluation_sampling.n = spec.evaluation_sampling.n or 1
    for field, value in (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        if not spec.sampling.HasField(field):
            setattr(spec.sampling, field, value)
    validation.environment("spec.environment", spec.environment)
    if spec.HasField("temperature_schedule"):
        validation.temperature_schedule("spec.temperature_schedule", spec.temperature_schedule)
    for n, verifier in enumerate(spec.verifiers):
        validation.identifier(f"spec.verifiers[{n}].name", verifier.name)
    return spec


def _default(spec: broker_pb2.RunSpec, field: str, value: int, most: int = validation.MAX_INTEGER) -> None:
    setattr(spec, field, validation.integer(f"spec.{field}", getattr(spec, field) or value, 1, most))


def _default_duration(spec: broker_pb2.RunSpec, field: str, seconds: float) -> None:
    duration: Duration = getattr(spec, field)
    if duration == Duration():
        duration.CopyFrom(to_duration(seconds))
    if not 0.001 <= to_seconds(duration) <= _LONGEST_SECONDS:
        raise invalid_argument(f"spec.{field}", came=f"{to_seconds(duration):g} s", allowed="1 ms to 366 days")


def _choice(kind, field: str, value: int, default: int) -> int:
    if value not in kind.values():
        raise invalid_argument(f"spec.{field}", came=value, allowed=", ".join(kind.keys()[1:]))
    return value or default


def first_difference(stands: broker_pb2.RunSpec, asked: broker_pb2.RunSpec) -> str | None:
    """Return a sentence about the first field in which two complete specifications differ, or None."""
    for field in broker_pb2.RunSpec.DESCRIPTOR.fields:
        old, new = getattr(stands, field.name), getattr(asked, field.name)
        if old != new:
            return f"{field.name} is {_short(old)}, asked for {_short(new)}"
    return None


def _short(value: object) -> str:
    text = " ".join(str(value).split()) or "empty"
    return text if len(text) <= 120 else text[:117] + "..."


def script_fields(spec: broker_pb2.RunSpec, section: BrokerSection) -> list[Value]:
    """Return field, value, ... of the run's hash: the numbers that the scripts decide by."""
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
        "max_first_dead": section.max_first_dead,
        "remembered": section.remembered_instances,
        "remembered_lives": section.remembered_lives,
    }
    return [part for item in fields.items() for part in item]


def _milliseconds(duration: Duration) -> int:
    return round(to_seconds(duration) * 1000)
