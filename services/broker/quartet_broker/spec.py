"""A run's specification: its checks, its defaults, and what of it the scripts need."""

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from quartet.v1 import broker_pb2, experience_pb2

from quartet_broker import validation
from quartet_broker.config import BrokerSection
from quartet_broker.store import Value
from quartet_common.config import EnvironmentSection, RunSection
from quartet_common.durations import to_seconds
from quartet_common.errors import invalid_argument
from quartet_common.run_spec import environment_spec, run_spec
from quartet_common.sampling import SamplingSection, given, to_message

_LONGEST_SECONDS = 366 * 86400.0
_MOST_GROUPS_PER_STEP = 1 << 16  # a batch's manifest names them all in one message


def _run_file_defaults() -> broker_pb2.RunSpec:
    defaults = run_spec(RunSection())
    # What these are where nobody says depends on something else: see `with_defaults` and the comments of the contract.
    for field in ("run_id", "verifiers", "evaluation_sampling"):
        defaults.ClearField(field)
    defaults.sampling.CopyFrom(to_message(SamplingSection()))
    defaults.sampling.ClearField("max_new_tokens")
    return defaults


_DEFAULTS = _run_file_defaults()
_ENVIRONMENT = environment_spec(EnvironmentSection())


def with_defaults(given: broker_pb2.RunSpec) -> broker_pb2.RunSpec:
    """Return a specification in which every field that was not set has the value that this stands for.

    The defaults are those of the run file: a key that is new in a release has its default here too, and a run
    that an earlier release made compares equal to what the same run file asks for today.
    """
    spec = broker_pb2.RunSpec()
    spec.CopyFrom(given)
    _fill(spec, _DEFAULTS)
    spec.sampling.n = spec.sampling.n or spec.group_size
    spec.evaluation_sampling.n = spec.evaluation_sampling.n or 1
    _fill(spec.evaluation_sampling, spec.sampling)
    if spec.HasField("environment"):
        _fill(spec.environment, _ENVIRONMENT)
    if spec.HasField("temperature_schedule"):
        spec.temperature_schedule.curve = spec.temperature_schedule.curve or experience_pb2.TEMPERATURE_CURVE_STEP
    for verifier in spec.verifiers:
        verifier.weight = verifier.weight or 1.0
    return spec


def _fill(message: Message, defaults: Message) -> None:
    """Set what is not set in a message: to be unset is to be empty, or 0 in a field without presence."""
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
    validation.integer("spec.groups_per_step", spec.groups_per_step, 1, _MOST_GROUPS_PER_STEP)
    validation.integer("spec.max_deliveries", spec.max_deliveries, 1, 1 << 20)
    for field in ("max_queued_prompts", "max_experience_bytes"):
        validation.integer(f"spec.{field}", getattr(spec, field), 1)
    for field in ("max_staleness", "max_steps", "max_prompt_tokens"):
        validation.integer(f"spec.{field}", getattr(spec, field), 0)
    _check_choice(broker_pb2.LeaseOrder, "lease_order", spec.lease_order)
    _check_choice(broker_pb2.PartialBatchPolicy, "partial_batch", spec.partial_batch)
    _check_choice(broker_pb2.LongPromptPolicy, "long_prompts", spec.long_prompts)
    for field in ("prompt_lease_ttl", "member_ttl", "result_ttl"):
        seconds = to_seconds(getattr(spec, field))
        if not 0.001 <= seconds <= _LONGEST_SECONDS:
            raise invalid_argument(f"spec.{field}", came=f"{seconds:g} s", allowed="1 ms to 366 days")
    validation.sampling("spec.sampling", spec.sampling)
    validation.sampling("spec.evaluation_sampling", spec.evaluation_sampling)
    validation.environment("spec.environment", spec.environment)
    if spec.HasField("temperature_schedule"):
        validation.temperature_schedule("spec.temperature_schedule", spec.temperature_schedule)
    validation.verifiers("spec.verifiers", spec.verifiers)
    return spec


def _check_choice(kind, field: str, value: int) -> None:
    if value not in kind.values():
        raise invalid_argument(f"spec.{field}", came=value, allowed=", ".join(kind.keys()[1:]))


def first_difference(stands: broker_pb2.RunSpec, asked: broker_pb2.RunSpec) -> str | None:
    """Return a sentence about the first field in which two specifications differ, or None; unset is the default."""
    stands, asked = with_defaults(stands), with_defaults(asked)
    for field in broker_pb2.RunSpec.DESCRIPTOR.fields:
        old, new = getattr(stands, field.name), getattr(asked, field.name)
        if old != new:
            if isinstance(old, experience_pb2.SamplingParams):  # longer than what is shown
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
        "max_event_bytes": section.max_event_bytes,
        "max_evaluation_bytes": section.max_evaluation_bytes,
        "max_prompt_bytes": section.max_prompt_bytes,
        "caller_share": section.max_caller_share,
        "max_first_dead": section.max_first_dead,
        "remembered": section.remembered_instances,
        "remembered_lives": section.remembered_lives,
    }
    return [part for item in fields.items() for part in item]


def _milliseconds(duration: Duration) -> int:
    return round(to_seconds(duration) * 1000)
