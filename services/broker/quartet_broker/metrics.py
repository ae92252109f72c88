"""The broker's Prometheus metrics."""

from quartet_server import metrics

GROUPS_PUT = metrics.counter(
    "quartet_broker_groups_put_total", "Groups put by rollouts, by outcome.", ["run", "outcome"]
)
PROMPTS_LEASED = metrics.counter("quartet_broker_prompts_leased_total", "Prompts leased to rollouts.", ["run"])
SHARES_REACHED = metrics.counter(
    "quartet_broker_shares_reached_total",
    "Requests for prompts that got fewer because the rollout has its fair share and others ask.",
    ["run"],
)
REDIS = metrics.gauge(
    "quartet_broker_redis", "1 for the state that Redis is in (ok, away, full, refusing), 0 for the others.", ["state"]
)
RUN = metrics.gauge("quartet_broker_run", "RunStats of each run.", ["run", "count"])
RUN_ACTIVE = metrics.gauge("quartet_broker_run_active", "1 while the run is active, 0 after its end.", ["run"])

OF_A_RUN = (GROUPS_PUT, PROMPTS_LEASED, SHARES_REACHED, RUN, RUN_ACTIVE)
"""Metrics with the label `run`."""


def forget_run(run_id: str) -> None:
    """Remove a run's time series."""
    for metric in OF_A_RUN:
        metric.remove_by_labels({"run": run_id})
