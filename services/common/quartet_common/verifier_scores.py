"""What each verifier gave to completions, and what it compared them with."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from quartet.v1 import experience_pb2, reward_pb2

_METRIC = re.compile(r"reward/(.+)/(mean|ans_acc)")


def short_names(names: Iterable[str]) -> list[str]:
    """Return verifiers' names in metrics: the function's of "rewards.py:close"; a second one of a name is "close-2"."""
    short = [name.rpartition(":")[2] for name in names]
    counts = [short[: i + 1].count(name) for i, name in enumerate(short)]
    return [name if count == 1 else f"{name}-{count}" for name, count in zip(short, counts, strict=True)]


def verifier_means(completions: Iterable[experience_pb2.CompletionInfo]) -> list[experience_pb2.VerifierMean]:
    """Return each verifier's means over the completions of a group; of several seats, "SEAT/NAME" of each."""
    found: dict[str, list[reward_pb2.VerifierScore]] = defaultdict(list)
    for completion in completions:
        verifiers, of_seat = completion.score.verifiers, f"{completion.seat}/" if completion.seat else ""
        for name, one in zip(short_names(one.name for one in verifiers), verifiers, strict=True):
            found[of_seat + name].append(one)
    means = []
    for name, parts in found.items():
        rewards = [one.reward for one in parts if one.outcome]  # without an outcome it abstained
        judged = [one.ans_acc for one in parts if one.HasField("ans_acc")]
        mean = experience_pb2.VerifierMean(name=name, completions=len(rewards), judged=len(judged))
        mean.reward, mean.ans_acc = sum(rewards) / max(1, len(rewards)), sum(judged) / max(1, len(judged))
        means.append(mean)
    return means


def verifier_metrics(means: Iterable[experience_pb2.VerifierMean], prefix: str = "") -> dict[str, float]:
    """Return `reward/NAME/mean` and `reward/NAME/ans_acc` over all groups, each where there is one."""
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for mean in means:
        for kind, value, count in (("mean", mean.reward, mean.completions), ("ans_acc", mean.ans_acc, mean.judged)):
            sums[f"{prefix}reward/{mean.name}/{kind}"] += value * count
            counts[f"{prefix}reward/{mean.name}/{kind}"] += count
    return {name: sums[name] / count for name, count in counts.items() if count}


def by_verifier(metrics: Mapping[str, Any], kind: str, prefix: str = "") -> dict[str, str]:
    """Return the metrics' names with `verifier_metrics` of a kind, "mean" or "ans_acc", by the verifier's name."""
    found = (_METRIC.fullmatch(name.removeprefix(prefix)) for name in sorted(metrics) if name.startswith(prefix))
    return {match[1]: prefix + match[0] for match in found if match and match[2] == kind}


def references(group: experience_pb2.GroupTranscript) -> dict[str, str]:
    """Return what a group's verifiers compare with, by column. If that is unknown: the prompt's whole reference."""
    reference, columns = group.instance.prompt.reference, {}
    with suppress(ValueError, TypeError, RecursionError):  # what verifiers that read no column accept
        columns = dict(json.loads(group.instance.prompt.columns or "{}"))
    cases = [[case.input, case.output] for case in reference.test_cases]
    own = {"gt_answer": reference.answer, "test_cases": cases, "test_program": reference.test_program}
    verifiers = [one for completion in group.completions[:1] for one in completion.score.verifiers]
    names = [name for one in verifiers for name in one.reads]
    if not any(one.weight for one in verifiers):  # of an earlier reward service
        names = list(own)
    if "*" in names:
        names += columns
    values = {"answer": reference.answer, **columns, **own}
    found = {name: values[name] for name in dict.fromkeys(names) if values.get(name) not in (None, "", [])}
    return {name: one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for name, one in found.items()}


def turns_text(rewards: Sequence[float | None]) -> str:
    """Return e.g. "turns: 0.5, –, 1"; "" if no turn has a reward."""
    if all(reward is None for reward in rewards):
        return ""
    return "turns: " + ", ".join("–" if reward is None else f"{reward:g}" for reward in rewards)


def verifier_text(name: str, reward: float, weight: float, outcome: str, reason: str) -> str:
    """Return e.g. "close: reward 0.5 × weight 2, incorrect: 3 is not 4"; `weight` 0: unknown."""
    if outcome == "unspecified":
        return f"{name}: abstained"
    times = f" × weight {weight:g}" if weight else ""
    return f"{name}: reward {reward:g}{times}, {outcome.replace('_', ' ')}" + (f": {reason}" if reason else "")
