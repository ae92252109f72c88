"""The [run] section as the contract's RunSpec."""

from quartet.v1 import broker_pb2, experience_pb2, reward_pb2

from quartet_common.config import CurriculumSection, RunSection, TemperatureScheduleSection
from quartet_common.durations import to_duration
from quartet_common.sampling import FIRST_RELEASE, SamplingSection, to_message
from quartet_common.sections import EnvironmentSection, VerifierSection

_CURVES = {
    "constant": experience_pb2.TEMPERATURE_CURVE_STEP,
    "piecewise": experience_pb2.TEMPERATURE_CURVE_STEP,
    "linear": experience_pb2.TEMPERATURE_CURVE_LINEAR,
    "colossalchat": experience_pb2.TEMPERATURE_CURVE_LINEAR,
    "cosine": experience_pb2.TEMPERATURE_CURVE_COSINE,
}
_COLOSSALCHAT_LAST = 0.9
# Keys of [run] with the same name and value in the specification.
_SAME_FIELDS = (
    *("group_size", "groups_per_step", "max_staleness", "max_deliveries", "max_queued_prompts", "max_experience_bytes"),
    *("max_steps", "system_prompt", "max_prompt_tokens", "labels", "sampling_masks", "router_replay"),
    "add_special_tokens",
)


def run_spec(run: RunSection) -> broker_pb2.RunSpec:
    """Return the specification that CreateRun takes."""
    given = run.evaluation_sampling.model_dump(exclude_unset=True) if run.evaluation_sampling is not None else {}
    evaluation = run.sampling.model_copy(update={"n": 1} | given)
    return broker_pb2.RunSpec(
        run_id=run.id,
        **{name: getattr(run, name) for name in _SAME_FIELDS},
        **{name: to_duration(getattr(run, name)) for name in ("prompt_lease_ttl", "member_ttl", "result_ttl")},
        lease_order=broker_pb2.LeaseOrder.Value(f"LEASE_ORDER_{run.lease_order.upper()}"),
        partial_batch=broker_pb2.PartialBatchPolicy.Value(f"PARTIAL_BATCH_POLICY_{run.partial_batch.upper()}"),
        long_prompts=broker_pb2.LongPromptPolicy.Value(f"LONG_PROMPT_POLICY_{run.long_prompts.upper()}"),
        sampling=_sampling_params(run.sampling, SamplingSection()),
        evaluation_sampling=_sampling_params(evaluation, run.sampling),
        verifiers=[verifier_spec(verifier) for verifier in run.verifiers],
        environment=environment_spec(run.environment) if run.environment is not None else None,
        temperature_schedule=temperature_schedule(run.temperature_schedule, run.sampling.temperature),
        teachers=list(run.teachers),
        curriculum=curriculum_spec(run.curriculum) if run.curriculum is not None else None,
    )


def _sampling_params(sampling: SamplingSection, unset: SamplingSection) -> experience_pb2.SamplingParams:
    """Return the sampling parameters. Keys newer than the first release are set only if they differ from `unset`, the
    values that an unset field stands for, so that peers without the key still work. Keys of the first release are
    always set, since its brokers compare specifications as they were sent."""
    others = {key for key in sampling.model_dump() if getattr(sampling, key) != getattr(unset, key)}
    return to_message(sampling, FIRST_RELEASE | others)


def verifier_spec(verifier: VerifierSection) -> reward_pb2.VerifierSpec:
    """Return the contract's message for a verifier."""
    spec = reward_pb2.VerifierSpec(name=verifier.spec_name, weight=verifier.weight)
    spec.parameters.update(verifier.parameters)
    return spec


def environment_spec(environment: EnvironmentSection) -> experience_pb2.EnvironmentSpec:
    """Return the contract's message for an environment.

    Future keys must be set only if they differ from their defaults: a new release must not change a prompt's content,
    by which the broker recognizes it when it is submitted again.
    """
    spec = experience_pb2.EnvironmentSpec(
        name=environment.spec_name,
        max_turns=environment.max_turns,
        max_turn_tokens=environment.max_turn_tokens,
        max_answer_tokens=environment.max_answer_tokens,
        answer_deadline=to_duration(environment.answer_deadline_seconds),
        scored_text=experience_pb2.ScoredText.Value(f"SCORED_TEXT_{environment.scored_text.upper()}"),
    )
    if environment.served:
        spec.served, spec.add_verifiers = True, environment.add_verifiers
        spec.ClearField("max_answer_tokens")
        if "answer_deadline_seconds" not in environment.model_fields_set:
            spec.ClearField("answer_deadline")  # the contract's default for a whole episode
    spec.parameters.update(environment.parameters)
    return spec


def curriculum_spec(curriculum: CurriculumSection) -> broker_pb2.Curriculum:
    """Return the contract's message for a curriculum."""
    unit = broker_pb2.CurriculumUnit.Value(f"CURRICULUM_UNIT_{curriculum.by.upper()}")
    return broker_pb2.Curriculum(**curriculum.model_dump() | {"by": unit})


def temperature_schedule(
    schedule: TemperatureScheduleSection | None, temperature: float
) -> experience_pb2.TemperatureSchedule | None:
    """Return the schedule as points and a curve.

    ColossalChat generates micro-batch 0 of its first pass at T0 and, after each micro-batch i of L, sets the
    temperature to (1 - i/L) T0 + (i/L) 0.9; after the pass it stays. With one micro-batch an update, version v >= 1
    comes after micro-batch v - 1: a straight line from version 1 to L, where i is L - 1.

    Args:
        schedule: of the run file.
        temperature: the run's, T0 of ColossalChat's schedule.
    """
    if schedule is None:
        return None
    points = schedule.points
    if schedule.kind == "colossalchat":
        updates = schedule.updates
        share = (updates - 1) / updates
        last = (updates, (1 - share) * temperature + share * _COLOSSALCHAT_LAST)
        points = [(1, temperature), last] if updates > 1 else [last]
    return experience_pb2.TemperatureSchedule(
        points=[
            experience_pb2.TemperaturePoint(policy_version=version, temperature=value) for version, value in points
        ],
        curve=_CURVES[schedule.kind],
    )
