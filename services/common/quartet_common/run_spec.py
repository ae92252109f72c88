"""The [run] section as the contract's RunSpec."""

from quartet.v1 import broker_pb2, experience_pb2, reward_pb2

from quartet_common.config import RunSection, SamplingSection, VerifierSection
from quartet_common.durations import to_duration

_LEASE_ORDERS = {
    "fifo": broker_pb2.LEASE_ORDER_FIFO,
    "fresh_first": broker_pb2.LEASE_ORDER_FRESH_FIRST,
}
_PARTIAL_BATCHES = {
    "drop": broker_pb2.PARTIAL_BATCH_POLICY_DROP,
    "train": broker_pb2.PARTIAL_BATCH_POLICY_TRAIN,
}
_LONG_PROMPTS = {
    "refuse": broker_pb2.LONG_PROMPT_POLICY_REFUSE,
    "truncate_left": broker_pb2.LONG_PROMPT_POLICY_TRUNCATE_LEFT,
}


def run_spec(run: RunSection) -> broker_pb2.RunSpec:
    """Return the specification that CreateRun takes."""
    evaluation = run.evaluation_sampling or run.sampling.model_copy(update={"n": 1})
    return broker_pb2.RunSpec(
        run_id=run.id,
        group_size=run.group_size,
        groups_per_step=run.groups_per_step,
        max_staleness=run.max_staleness,
        lease_order=_LEASE_ORDERS[run.lease_order],
        partial_batch=_PARTIAL_BATCHES[run.partial_batch],
        max_deliveries=run.max_deliveries,
        max_queued_prompts=run.max_queued_prompts,
        max_experience_bytes=run.max_experience_bytes,
        prompt_lease_ttl=to_duration(run.prompt_lease_ttl),
        member_ttl=to_duration(run.member_ttl),
        result_ttl=to_duration(run.result_ttl),
        max_steps=run.max_steps,
        sampling=sampling_params(run.sampling),
        evaluation_sampling=sampling_params(evaluation),
        verifiers=[verifier_spec(verifier) for verifier in run.verifiers],
        system_prompt=run.system_prompt,
        max_prompt_tokens=run.max_prompt_tokens,
        labels=run.labels,
        long_prompts=_LONG_PROMPTS[run.long_prompts],
        sampling_masks=run.sampling_masks,
    )


def sampling_params(sampling: SamplingSection) -> experience_pb2.SamplingParams:
    """Return the sampling parameters with every field set."""
    return experience_pb2.SamplingParams(**sampling.model_dump(exclude_none=True))


def verifier_spec(verifier: VerifierSection) -> reward_pb2.VerifierSpec:
    """Return the verifier's choice with its parameters as a Struct."""
    spec = reward_pb2.VerifierSpec(name=verifier.name, weight=verifier.weight)
    spec.parameters.update(verifier.parameters)
    return spec
