"""The reward service's metrics, beside those that all services have."""

from quartet.v1 import reward_pb2

from quartet_server import metrics

VERIFICATIONS = metrics.histogram(
    "quartet_reward_verification_seconds",
    "Wall time of a verification, queueing excluded, by verifier and outcome or failure.",
    ["verifier", "outcome"],
    buckets=(0.0001, *metrics.LATENCY_BUCKETS),
)
QUEUE_DEPTH = metrics.gauge(
    "quartet_reward_queue_depth",
    "Tasks by queue (math, code, reward_model, reward_model_texts, a function's path) and state: waiting, running.",
    ["queue", "state"],
)
WORKERS_ALIVE = metrics.gauge(
    "quartet_reward_workers", "Worker processes, including those that are starting.", ["pool"]
)
WORKERS_ENDED = metrics.counter(
    "quartet_reward_workers_ended_total",
    "Worker processes replaced, by reason: deadline, cancelled, died, recycled.",
    ["pool", "reason"],
)
REWARD_MODEL_BATCH = metrics.histogram(
    "quartet_reward_model_batch_texts",
    "Texts in a batch of the reward model.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
)
EXECUTIONS = metrics.counter(
    "quartet_reward_executions_total",
    "Executions in the sandbox by ending: exited, signalled, timed_out, memory_exceeded, output_exceeded; repeated: it "
    "or the fork server was killed or stopped from outside, and it was run again.",
    ["ending"],
)
EQUALITY_DECISIONS = metrics.counter(
    "quartet_reward_equality_total", "Math equalities decided, by way: exact, cache, worker.", ["way"]
)

REFERENCES = metrics.counter(
    "quartet_reward_references_total",
    "References compared with as mathematics, by how they read: mathematics, text (only the same text is equal).",
    ["read_as"],
)


def outcome_name(outcome: int) -> str:
    """Return "correct" for OUTCOME_CORRECT."""
    return reward_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()


def failure_name(kind: int) -> str:
    """Return "verifier_crashed" for FAILURE_KIND_VERIFIER_CRASHED."""
    return reward_pb2.FailureKind.Name(kind).removeprefix("FAILURE_KIND_").lower()
