"""docs/prometheus.md: every Prometheus metric, from the declarations in the services."""

import sys
from pathlib import Path

from escaping import escaped

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "deploy"))
from metric_names import declared_metrics

HEAD = """\
# Prometheus

Every service serves its metrics at `http://HOST:PORT/metrics`, where PORT is its gRPC port plus 100 (`server.metrics`,
`server.metrics_port_offset`), where `server.bind_host` listens. Names and labels are only added. Series labeled with a
run go when the run is deleted, or 15 minutes after its end. A trainer shows its run, a rollout the one it works for.

A request's `Host` must name the service: by an address, by a name without a dot, by the host's own name, by that of
`[addresses]`, or by one of `server.metrics_hosts`. Others get 421, so that no page in a browser reads metrics by a name
of its own that points here. A port serves 16 connections at a time; a new one replaces the oldest. A connection that
sends nothing for 5 s is closed.

| file in `deploy/observability/` | is |
|---|---|
| `prometheus.yaml` | a scrape configuration for the services |
| `alerts.yaml` | alert rules; each says what to look at first |
| `grafana.json` | a dashboard: import it and choose the Prometheus data source |

The metrics of a training step ([metrics.md](metrics.md)) are `quartet_trainer_metric{name="reward/mean"}` and so on.
The tables are made from the declarations by `docs/tools/write.py`; tests compare rules and dashboard with them.

| to see | ask for |
|---|---|
| the share of a core that a service uses | `rate(process_cpu_seconds_total[1m])` |
| when a service was started | `process_start_time_seconds` |
| how long a certificate is good | `quartet_certificate_expiry_timestamp_seconds - time()` |
| what a trainer does now | `quartet_trainer_phase == 1` |
| how idle the trainer is | `rate(quartet_trainer_phase_seconds_total{phase="waiting_for_batch"}[1m])` |
| how idle a rollout is | the time when `quartet_rollout_running_completions` is 0 |
| how busy the reward service is | `quartet_reward_queue_depth{state="running"}` over `quartet_reward_workers` |
| how many episodes are played, and for how long | `quartet_environment_episodes`, `…_episode_seconds` |

`tests/deploy/alert_scenarios.yaml` has situations in which each alert fires, and others in which it does not. The end
of a run, what it leaves, a paused trainer and an evaluation raise none. A trainer exits at the end of its run, so
`QuartetRunWithoutTrainer` fires only while its run has work; fine-tuning with `--sft` has no run at a broker: watch the
exit status of its process. `QuartetCrashLoop` also counts trainers that follow each other at one address.

Broker and reward service also report their idle share of the last minute in the handshake (`idle_fraction`).
"""
SERVICES = {
    "common": "All services",
    "broker": "Broker",
    "reward": "Reward",
    "rollout": "Rollout",
    "environment": "Environment",
    "trainer": "Trainer",
}


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for service, title in SERVICES.items():
        parts.append(f"\n## {title}\n\n| name | kind | labels | meaning |\n|---|---|---|---|\n")
        for metric in declared_metrics().values():
            if metric.service == service:
                labels = ", ".join(f"`{label}`" for label in metric.labels)
                meaning = escaped(metric.description.removesuffix("."))
                parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {meaning} |\n")
    return "".join(parts)
