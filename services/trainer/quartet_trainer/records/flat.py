"""Notices rewards from which nothing can be learned: all equal, without an answer, or with text as every reference."""

from collections import Counter
from collections.abc import Sequence

from quartet.v1 import experience_pb2, reward_pb2

from quartet_common.text import one_line
from quartet_trainer.records.journal import outcome_name

STEPS = 3
"""Steps after which a run says that its rewards are flat."""
_SHOWN = 80


class FlatRewards:
    """Reads the scores of all steps from the first one, while they are flat.

    Args:
        grouped: whether the algorithm compares the completions of a group; else all rewards must be equal.
        first_step: of this process; after a restart, which has not seen the first steps, nothing is read.
    """

    def __init__(self, grouped: bool, first_step: int = 0):
        self._grouped = grouped
        self._equal = self._malformed = self._texts = first_step == 0
        self._rewards: set[float] = set()
        self._outcomes: Counter[int] = Counter()
        self._example = ""
        self.steps = 0

    def add(self, transcripts: Sequence[experience_pb2.GroupTranscript]) -> None:
        """Add the groups of a step."""
        self.steps += 1
        for transcript in transcripts:
            scores = [each.score for each in transcript.completions]
            of_group = {(each.seat, each.score.reward) for each in transcript.completions}
            seats = len({seat for seat, _ in of_group}) or 1
            self._rewards |= {score.reward for score in scores}
            self._outcomes.update(score.outcome for score in scores)
            self._equal &= len(of_group) <= seats if self._grouped else len(self._rewards) <= 1
            self._malformed &= all(score.outcome == reward_pb2.OUTCOME_MALFORMED for score in scores)
            self._texts &= all(any(one.reference_is_text for one in score.verifiers) for score in scores)
            if scores and not self._example:
                why = scores[0].reason or f"answer read: {scores[0].parsed_answer or 'none'}"
                text = transcript.completions[0].text[-_SHOWN:]
                self._example = one_line(f"'{transcript.instance.instance_id}' ({why[:_SHOWN]}): …{text}")

    def sentence(self) -> str:
        """Return what is flat, its share, an example and where to look; "" if nothing is."""
        total = self._outcomes.total()
        if not total or not (self._equal or self._malformed or self._texts):
            return ""
        reward = f"{next(iter(self._rewards)):g}" if len(self._rewards) == 1 else "equal in each group"
        flat = f"every reward is {reward}, so that nothing is learned"
        if self._texts:
            flat = (
                "every reference is text, not mathematics, so that only the same text is right (name the answer's "
                "column in `fields`, or use the verifier 'exact')"
            )
        elif not self._equal:
            flat = "no answer was found"
        outcome, count = self._outcomes.most_common(1)[0]
        name = outcome_name(outcome).replace("_", " ")
        return (
            f"rewards: {flat}: {total} completions in {self.steps} step{'s' if self.steps > 1 else ''}, {count} of "
            f"{total} {name}; for example {self._example}; see samples/ in the run's "
            "folder, and try completions with quartet score"
        )
