"""What a curriculum needs of the prompts that it follows."""

from collections import Counter
from collections.abc import Sequence

from quartet_client.errors import InputError
from quartet_client.mixture import Part
from quartet_common.config import RunSection

_WITHOUT_ACCURACY = frozenset({"format", "length", "reward_model"})
"""Verifiers that never judge whether an answer is right."""


def check_curriculum(run: RunSection, passes: int, parts: Sequence[Part]) -> None:
    """Raise InputError if the run's curriculum, if it has one, cannot follow the prompts; `passes`: data.passes."""
    if run.curriculum is None:
        return
    if run.curriculum.floor == 0 and passes == 0:
        raise InputError(
            "run.curriculum.floor: got 0 with data.passes = 0: once every prompt is skipped, the run would go on "
            "without a step; allowed: a floor above 0, or data.passes above 0"
        )
    if run.curriculum.by == "source" and len(parts) == 1:
        raise InputError(
            "run.curriculum.by: got 'source', and data.train is one source, which would be skipped as a whole; "
            "allowed: several sources, or by = 'prompt'"
        )
    for part in parts:
        verifiers = {one.spec_name for each in part.prompts for one in each.verifiers or run.verifiers}
        if run.environment is None and verifiers <= _WITHOUT_ACCURACY:
            of = f" of source '{part.name}'" if part.name else ""
            raise InputError(
                f"run.curriculum: no verifier judges the answers{of} ({', '.join(sorted(verifiers))}), so that "
                "there is no accuracy to follow; allowed: with a verifier that judges, such as think_answer_tags"
            )
        twice = [one for one, count in Counter(each.id for each in part.prompts).items() if count > 1]
        if twice and run.curriculum.by == "prompt":
            raise InputError(
                f"run.curriculum: id '{twice[0]}' names several prompts, whose answers would count as one "
                "prompt's; give each prompt its own id, or leave ids out"
            )
