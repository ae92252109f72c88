"""`short` in the reward service: its entry point, its parameters, its rewards compared with ones computed by hand."""

import pytest
from quartet.v1 import reward_pb2

from quartet_common.config import ConfigError, load_config
from quartet_reward.config import RewardSection
from quartet_reward.math.equality import MathEquality
from quartet_reward.preflight import preflight
from quartet_reward.verifiers.base import Tools
from quartet_reward.verifiers.registry import load_verifiers


@pytest.mark.parametrize(("words", "reward"), [(3, 1.0), (4, 0.75), (6, 0.25), (9, 0.0)])
async def test_each_word_too_many_costs(words, reward):
    short = load_verifiers()["short"]
    item = reward_pb2.ScoreItem(completion="word " * words)
    verdict = await short.verify(item, short.parameters(words=3, penalty=0.25), Tools(MathEquality(None)))
    assert verdict.reward == reward and f"{words} words" in verdict.reason
    assert (verdict.outcome == reward_pb2.OUTCOME_CORRECT) == (words <= 3)


def test_run_file_names_the_verifier():
    named = "run.verifiers=[{{name='short', parameters={{{}}}}}]"
    preflight(load_config("reward", RewardSection, overrides=[named.format("words=20")]))
    with pytest.raises(ConfigError, match="words"):
        preflight(load_config("reward", RewardSection, overrides=[named.format("words=0")]))
