"""Decides whether a training that has ended succeeded or failed, for FinishRun."""

from collections import Counter
from collections.abc import Callable, Iterable

from quartet.v1 import broker_pb2, experience_pb2

from quartet_common.text import without_numbers


def judge(
    ending: str,
    steps: int,
    run: broker_pb2.Run,
    list_dead: Callable[[], Iterable[broker_pb2.DeadPrompt]],
    failure: str = "",
) -> tuple[broker_pb2.RunState, str]:
    """Return a run's final state and the reason. It failed if no step was trained or most prompts are dead.

    Args:
        ending: why the training ended.
        steps: optimizer steps in the weights.
        run: read after the last commit.
        list_dead: returns the dead prompts whose reasons are counted.
        failure: a reason for which the run failed in any case; "": none.
    """
    if failure:
        return broker_pb2.RUN_STATE_FAILED, f"{ending}: {steps} steps trained; {failure}"
    stats, trained = run.stats, f"{ending}: {steps} steps trained"
    if stats.skipped:
        trained += f", {stats.skipped} prompts skipped by the curriculum"
    done = stats.dead_training + stats.committed + stats.trained + stats.dropped
    if steps > 0 and 2 * stats.dead_training <= done:
        return broker_pb2.RUN_STATE_SUCCEEDED, trained
    if stats.dead_training:
        why = f"{stats.dead_training} of {done} prompts are dead{_most_common(list_dead())}"
    else:
        why = f"{done} prompts came to an end, and a step takes {run.spec.groups_per_step} groups (run.groups_per_step)"
    return broker_pb2.RUN_STATE_FAILED, f"{trained}; {why}"


def _most_common(dead: Iterable[broker_pb2.DeadPrompt]) -> str:
    """Return the most common reason of the dead training prompts. Reasons that differ only in numbers count as one."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for prompt in dead:
        if prompt.reasons and prompt.instance.purpose == experience_pb2.PURPOSE_TRAIN:
            kind = without_numbers(prompt.reasons[-1])
            counts[kind] += 1
            examples.setdefault(kind, prompt.reasons[-1])
    if not counts:
        return ""
    kind, count = counts.most_common(1)[0]
    return f", {count} of {counts.total()} of one reason: {examples[kind]}"
