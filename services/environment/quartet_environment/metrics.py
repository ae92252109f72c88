"""The environment service's metrics, beside those that all services have."""

from quartet_server import metrics

EPISODE_SECONDS = metrics.histogram(
    "quartet_environment_episode_seconds",
    "Time of an episode, by environment and outcome: finished, failed (by the agent's fault), retryable (what it "
    "needed was away, its deadline, its process), refused (a parameter).",
    ["environment", "outcome"],
    buckets=(*metrics.LATENCY_BUCKETS, 300.0, 600.0, 1800.0),
)
EPISODES = metrics.gauge("quartet_environment_episodes", "Episodes that are being played.", ["environment"])
QUEUE_DEPTH = metrics.gauge(
    "quartet_environment_queue_depth",
    "Episodes by environment and state: waiting for a place in a process, running in one.",
    ["environment", "state"],
)
WORKERS_ALIVE = metrics.gauge(
    "quartet_environment_workers", "Worker processes, including those that are starting.", ["environment"]
)
WORKERS_ENDED = metrics.counter(
    "quartet_environment_workers_ended_total",
    "Worker processes that ended, by reason: hung, disobedient (an episode went on after its end), died, alone (it was "
    "for one episode).",
    ["environment", "reason"],
)
