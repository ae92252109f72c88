"""A run whose rewards are flat says so once, with the share, an example and where to look."""

import pytest
from quartet.v1 import experience_pb2, reward_pb2

from quartet_trainer.records.flat import FlatRewards


def group(
    *rewards: float, outcome: int = reward_pb2.OUTCOME_INCORRECT, text: bool = False, seats: str = ""
) -> experience_pb2.GroupTranscript:
    part = reward_pb2.VerifierScore(reference_is_text=text)
    scores = [reward_pb2.Score(reward=one, outcome=outcome, reason="no tag", verifiers=[part]) for one in rewards]
    return experience_pb2.GroupTranscript(
        instance=experience_pb2.PromptInstance(instance_id="pass-0/7"),
        completions=[
            experience_pb2.CompletionInfo(text="a\nb", score=score, seat=seats[n : n + 1])
            for n, score in enumerate(scores)
        ],
    )


@pytest.mark.parametrize(
    ("grouped", "groups", "said"),
    [
        (True, [group(0, 0), group(0, 0)], "every reward is 0, so that nothing is learned: 4 completions in 1 step"),
        (True, [group(0, 0), group(1, 1)], "every reward is equal in each group, so that nothing is learned"),
        (True, [group(1, -1, 1, -1, seats="abab")], "every reward is equal in each group, so that nothing is learned"),
        (True, [group(1, -1, -1, 1, seats="abab")], ""),
        (False, [group(0.5), group(0.5)], "every reward is 0.5, so that nothing is learned"),
        (True, [group(0, 1, outcome=reward_pb2.OUTCOME_MALFORMED)], "no answer was found: 2 completions in 1 step"),
        (True, [group(0, 0, text=True), group(0, 1, text=True)], "every reference is text, not mathematics"),
        (True, [group(0, 1, text=True), group(0, 1)], ""),
        (True, [group(0, 0), group(0, 1)], ""),
        (False, [group(0), group(1)], ""),
        (True, [], ""),
    ],
)
def test_flat_rewards_are_said_with_share_and_example(grouped, groups, said):
    flat = FlatRewards(grouped)
    flat.add(groups)
    assert said in flat.sentence() and bool(said) == bool(flat.sentence())
    if said:
        assert "for example 'pass-0/7' (no tag): …a" in flat.sentence() and "quartet score" in flat.sentence()
        assert "\n" not in flat.sentence()
        count = sum(len(each.completions) for each in groups)
        outcome = "malformed" if "no answer" in said else "incorrect"
        assert f"{count} of {count} {outcome}" in flat.sentence()


def test_a_reward_that_differs_later_ends_it():
    flat = FlatRewards(grouped=True)
    flat.add([group(0, 0)])
    assert flat.sentence()
    flat.add([group(0, 1)])
    flat.add([group(0, 0)])
    assert not flat.sentence()


def test_a_resumed_trainer_has_not_seen_the_first_steps():
    flat = FlatRewards(grouped=True, first_step=5)
    flat.add([group(0, 0)])
    assert not flat.sentence()
