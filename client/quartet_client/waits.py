"""What holds a run up: a broker that is away or full, or what its services wait for while nothing moves."""

import time

from quartet_client.models import RunStats
from quartet_client.progress import RunProgress, problem_of, starting
from quartet_client.streams import MAX_INSTANCES

STILL_SECONDS = 5.0
"""After so long without a change of the run's counts a full queue holds it up; while prompts are taken it is usual."""


def waits(state: RunProgress) -> dict[str, str]:
    """Return sentences by what holds the run up: a service, "queue" or "experience". Empty: it goes on."""
    if state.ended:
        return {}
    still = time.monotonic() - state.moved_at > STILL_SECONDS
    found = {
        kind: problem
        for kind, service in state.services.items()
        if (kind == "broker" or still) and kind not in starting(state) and (problem := problem_of(service))
    }
    if still and state.stepped and state.stats is not None and state.spec is not None:
        most = state.spec.max_queued_prompts
        if state.stats.queued + max(1, min(MAX_INSTANCES, most // 4)) > most:
            found["queue"] = (
                f"the broker's queue is full: {state.stats.queued} prompts wait, and at most {most} may "
                "(run.max_queued_prompts); no rollout takes any"
            )
        if _is_full(state.stats, state.spec.groups_per_step, state.spec.max_experience_bytes):
            found["experience"] = (
                f"the broker is full: {state.stats.experience_bytes:,} bytes of experience, and at most "
                f"{state.spec.max_experience_bytes:,} may be (run.max_experience_bytes); rollouts get no prompts until "
                "groups are trained"
            )
    return found


def _is_full(stats: RunStats, groups_per_step: int, most: int) -> bool:
    """Whether one more group of the mean size would be too much; groups of one batch always have room."""
    waiting = stats.ready + stats.leased_to_trainer
    mean = stats.experience_bytes / max(1, waiting + stats.trained)
    return waiting >= groups_per_step and stats.experience_bytes + mean * (stats.leased + 1) > most
