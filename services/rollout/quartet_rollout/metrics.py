"""Prometheus metrics of the rollout."""

from quartet_server import metrics

TOKENS = metrics.counter("quartet_rollout_tokens_total", "Tokens of finished completions.", ["purpose"])
GENERATED = metrics.counter(
    "quartet_rollout_generated_tokens_total", "Tokens generated, while this rollout works for the run.", ["run"]
)
COMPLETIONS = metrics.counter("quartet_rollout_completions_total", "Finished completions.", ["finish_reason"])
GROUPS = metrics.counter(
    "quartet_rollout_groups_total",
    "Groups by outcome: accepted, duplicate, lease_lost, stale, finished, given_back, failed, refused, unscored.",
    ["outcome"],
)
SHORTENED = metrics.counter("quartet_rollout_prompts_shortened_total", "Prompts truncated because they were too long.")
SCORING_SECONDS = metrics.histogram("quartet_rollout_scoring_seconds", "From a finished completion to its score.")
SCORING_RETRIES = metrics.counter("quartet_rollout_scoring_retries_total", "Retried verifications.")
TURNS = metrics.counter("quartet_rollout_turns_total", "Turns of the policy in completions with an environment.")
ENVIRONMENT_SECONDS = metrics.histogram(
    "quartet_rollout_environment_seconds", "From a turn of the policy to the environment's answer.", ["environment"]
)
ENVIRONMENT_TIMEOUTS = metrics.counter(
    "quartet_rollout_environment_timeouts_total",
    "Turns that an environment did not answer within run.environment.answer_deadline_seconds.",
    ["environment"],
)
EPISODES = metrics.counter(
    "quartet_rollout_episodes_total", "Episodes of served environments by outcome: played, failed.", ["outcome"]
)
PAUSE_SECONDS = metrics.histogram("quartet_rollout_pause_seconds", "Pause of generation for a weight update.")
WEIGHT_UPDATES = metrics.counter(
    "quartet_rollout_weight_updates_total",
    "Weight updates by outcome: installed, transfer_failed, checksum_differs, install_failed, given_up.",
    ["outcome"],
)
POLICY_VERSION = metrics.gauge("quartet_rollout_policy_version", "Policy version of the weights; -1: unknown.")
RUNNING = metrics.gauge("quartet_rollout_running_completions", "Completions being generated.")
WAITING = metrics.gauge("quartet_rollout_waiting_completions", "Completions waiting in the engine.")
KV_CACHE_USE = metrics.gauge("quartet_rollout_kv_cache_use", "Fraction of the KV cache in use; -1: not reported.")
TOKENS_PER_SECOND = metrics.gauge("quartet_rollout_tokens_per_second", "Tokens generated per second, smoothed.")
WINDOW = metrics.gauge("quartet_rollout_concurrency", "Completions that the engine may be given at once.")
STALLED = metrics.gauge(
    "quartet_rollout_stalled_seconds", "Time without a token while completions wait in the engine; 0: it generates."
)
STALL_LIMIT = metrics.gauge(
    "quartet_rollout_stall_limit_seconds", "Time without a token after which the rollout ends, to be restarted."
)
LEASES = metrics.gauge("quartet_rollout_leases", "Prompt leases held.")
