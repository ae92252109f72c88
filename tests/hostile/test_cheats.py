"""Wrong programs that cheat are not accepted; the right one is; and the sandbox serves on."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from quartet.v1 import reward_pb2

from quartet_reward.sandbox.api import Sandbox
from quartet_reward.verifiers.base import Tools, Verdict
from quartet_reward.verifiers.code import Code, CodeParameters
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
    Cheat,
)
from tests.hostile.sandboxes import opened
from tests.hostile.weak_tests import DECEPTIONS, STILL_POSSIBLE, Deception

SECONDS = 2.0


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    async with opened() as sandbox:
        yield sandbox


async def judged(sandbox: Sandbox, program: str, reference: reward_pb2.Reference, **parameters) -> Verdict:
    item = reward_pb2.ScoreItem(item_id="a", completion=f"```python\n{program}\n```", reference=reference)
    later = Code().verify(
        item, CodeParameters(timeout_seconds=SECONDS, **parameters), Tools(math=None, sandbox=sandbox)
    )
    return await later()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.asyncio(loop_scope="module")
async def test_the_right_program_is_accepted(sandbox, style):
    verdict = await judged(sandbox, HONEST, STYLES[style])
    assert verdict.outcome == reward_pb2.OUTCOME_CORRECT, verdict.reason


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("cheat", CHEATS, ids=lambda cheat: cheat.name)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_cheat_is_not_accepted(sandbox, cheat: Cheat, style: str):
    verdict = await judged(sandbox, cheat.program, STYLES[style])
    assert verdict.outcome != reward_pb2.OUTCOME_CORRECT
    assert verdict.reward == 0
    # The reason may show what the program answered, but the answer was not there to be found.
    assert not any(secret in verdict.reason for secret in SECRETS)


@pytest.mark.parametrize("cheat", DECEPTIONS, ids=lambda cheat: cheat.name)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_weak_test_is_not_deceived(sandbox, cheat: Deception):
    verdict = await judged(sandbox, cheat.program, cheat.reference, **cheat.parameters)
    assert verdict.outcome != reward_pb2.OUTCOME_CORRECT


@pytest.mark.parametrize("cheat", STILL_POSSIBLE, ids=lambda cheat: cheat.name)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_docs_call_possible_is_accepted(sandbox, cheat: Deception):
    verdict = await judged(sandbox, cheat.program, cheat.reference, **cheat.parameters)
    assert verdict.outcome == reward_pb2.OUTCOME_CORRECT, verdict.reason


@pytest.mark.parametrize("cheat", ERROR_CHEATS, ids=lambda cheat: cheat.name)
@pytest.mark.asyncio(loop_scope="module")
async def test_what_ends_a_program_is_no_expected_exception(sandbox, cheat: Cheat):
    verdict = await judged(sandbox, cheat.program, EXPECTS_ERROR)
    assert verdict.outcome != reward_pb2.OUTCOME_CORRECT


@pytest.mark.asyncio(loop_scope="module")
async def test_an_expected_exception_is_accepted(sandbox):
    program = "def answer(f):\n    return 'ORACLE-8264915' if f() == 1 else None"
    assert (await judged(sandbox, program, EXPECTS_ERROR)).outcome == reward_pb2.OUTCOME_CORRECT


@pytest.mark.asyncio(loop_scope="module")
async def test_the_right_script_is_accepted(sandbox):
    verdict = await judged(sandbox, HONEST_SCRIPT, SCRIPT)
    assert verdict.outcome == reward_pb2.OUTCOME_CORRECT, verdict.reason


@pytest.mark.parametrize("cheat", SCRIPT_CHEATS, ids=lambda cheat: cheat.name)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_cheating_script_is_not_accepted(sandbox, cheat: Cheat):
    verdict = await judged(sandbox, cheat.program, SCRIPT)
    assert verdict.outcome != reward_pb2.OUTCOME_CORRECT
    assert not any(secret in verdict.reason for secret in SECRETS)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_right_program_is_accepted_after_all_that(sandbox):
    verdict = await judged(sandbox, HONEST, STYLES["asserts"])
    assert verdict.outcome == reward_pb2.OUTCOME_CORRECT, verdict.reason


def test_the_docs_name_every_cheat():
    page = (Path(__file__).resolve().parents[2] / "docs" / "code.md").read_text(encoding="utf-8")
    for cheat in (*CHEATS, *DECEPTIONS, *STILL_POSSIBLE, *ERROR_CHEATS, *SCRIPT_CHEATS):
        assert f"| `{cheat.name}` | {cheat.tries} |" in page
