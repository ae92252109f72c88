"""`guess_number` in the rollout: its entry point and a game."""

from types import SimpleNamespace

import pytest
from quartet.v1 import experience_pb2

from quartet_common.config import RunSection
from quartet_rollout.environments import EnvironmentFailed, load_environments


def begin(answer: str, **parameters):
    environment = load_environments(RunSection())["guess_number"]
    prompt = experience_pb2.Prompt()
    prompt.reference.answer = answer
    assert environment.stop(environment.parameters()) == ("?",)
    return environment.begin(SimpleNamespace(prompt=prompt), environment.parameters(**parameters), None)


async def test_it_says_where_the_number_is():
    game = begin("37")
    said = [await game.answer(SimpleNamespace(text=text)) for text in ("50?", "er?", "is it 25?", "37?")]
    assert [answer and answer.text.strip() for answer in said] == ["Too high.", "A number, please.", "Too low.", None]
    await game.close()


def test_a_reference_that_is_not_a_number_can_never_work():
    with pytest.raises(EnvironmentFailed, match="not a number"):
        begin("thirty-seven")
