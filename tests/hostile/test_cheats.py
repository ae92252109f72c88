"""The verifier `code` rejects cheats and accepts the right program, and the sandbox continues to work."""

import pytest
from quartet.v1 import reward_pb2
from reward_samples import judged

from tests.hostile.cheats import (
    CHEATS,
    ERROR_CHEATS,
    EXPECTS_ERROR,
    HONEST,
    HONEST_SCRIPT,
    SCRIPT,
    SCRIPT_CHEATS,
    SECRETS,
    STYLES,
)
from tests.hostile.weak_tests import DECEPTIONS, STILL_POSSIBLE


def item_of(program: str, reference: reward_pb2.Reference) -> reward_pb2.ScoreItem:
    return reward_pb2.ScoreItem(item_id="a", completion=f"```python\n{program}\n```", reference=reference)


RIGHT = [(item_of(HONEST, reference), {}) for reference in STYLES.values()]
RIGHT += [(item_of(HONEST_SCRIPT, SCRIPT), {})]
RIGHT += [(item_of("def answer(f):\n    return 'ORACLE-8264915' if f() == 1 else None", EXPECTS_ERROR), {})]
RIGHT += [(cheat.item, cheat.parameters) for cheat in STILL_POSSIBLE]  # as the docs say
REFUSED = [pytest.param(cheat.item, cheat.parameters, id=cheat.name) for cheat in DECEPTIONS]
for cheats, styles in ((CHEATS, STYLES), (ERROR_CHEATS, {"error": EXPECTS_ERROR}), (SCRIPT_CHEATS, {"script": SCRIPT})):
    REFUSED += [
        pytest.param(item_of(cheat.program, styles[name]), {}, id=f"{cheat.name}-{name}")
        for cheat in cheats
        for name in styles
    ]


@pytest.mark.parametrize(("item", "parameters"), REFUSED)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_cheat_is_not_accepted(sandbox, item, parameters):
    result = await judged(sandbox, item, timeout_seconds=2.0, **parameters)
    assert result.HasField("score") and result.score.outcome != reward_pb2.OUTCOME_CORRECT, result
    assert result.score.reward == 0
    # The reason may show what the program answered, but the answer was not there to be found.
    assert not any(secret in result.score.reason for secret in SECRETS)


@pytest.mark.parametrize(("item", "parameters"), RIGHT)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_right_program_is_accepted_after_all_that(sandbox, item, parameters):
    result = await judged(sandbox, item, timeout_seconds=2.0, **parameters)
    assert result.score.outcome == reward_pb2.OUTCOME_CORRECT, result
