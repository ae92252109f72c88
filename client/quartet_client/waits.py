"""What holds a run up: a broker that is away or full, or what its services wait for while nothing moves."""

import time

from quartet_client.progress import RunProgress, problem_of, starting
from quartet_client.streams import MAX_INSTANCES

STILL_SECONDS = 5.0
"""After so long without a change of the run's counts a full queue holds it up; while prompts are taken it is usual."""


def waits(state: RunProgress) -> dict[str, str]:
    """Return sentences by what holds the run up: a service, "queue" or "experience". Empty: it goes on."""
    still = time.monotonic() - state.moved_at > STILL_SECONDS
    known = starting(state)
    shown = {
        kind: service for kind, service in state.services.items() if (kind == "broker" or still) and kind not in known
    }
    found = {} if state.ended else {kind: text for kind, service in shown.items() if (text := problem_of(service))}
    if state.ended or not still or not state.stepped or state.stats is None or state.spec is None:
        return found
    stats, prompts, room = state.stats, state.spec.max_queued_prompts, state.spec.max_experience_bytes
    if stats.queued + max(1, min(MAX_INSTANCES, prompts // 4)) > prompts:
        found["queue"] = (
            f"the broker's queue is full: {stats.queued} prompts wait, and at most {prompts} may "
            "(run.max_queued_prompts); no rollout takes any"
        )
    groups = stats.ready + stats.leased_to_trainer
    mean = stats.experience_bytes / max(1, groups + stats.trained)
    # As the broker's admission limit: no room for one more group of the mean size, and a batch is there.
    if groups >= state.spec.groups_per_step and stats.experience_bytes + mean * (stats.leased + 1) > room:
        found["experience"] = (
            f"the broker is full: {stats.experience_bytes:,} bytes of experience, and at most {room:,} may be "
            "(run.max_experience_bytes); rollouts get no prompts until groups are trained"
        )
    return found
