"""Text that a program chose reaches the caller whatever its characters and its length, and harms no other item."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from conftest import Running, serving
from hypothesis import example, given, settings
from hypothesis import strategies as st
from quartet.v1 import reward_pb2
from reward_samples import spec

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Where a program's text may end up in what is said about it; {} is an expression of the text.
PROGRAMS = {
    "exception": "def f(x): raise ValueError({})",
    "exception while the program starts": "raise ValueError({})",
    "name of an exception": "def f(x): raise type({}, (Exception,), {{}})",
    "text of an exception": "class E(Exception):\n    def __str__(self): return {}\ndef f(x): raise E",
    "exit": "def f(x): raise SystemExit({})",
    "result": "def f(x): return {}",
    "part of a result": "def f(x): return [{{{0}: {0}}}]",
    "representation": "class R:\n    def __repr__(self): return {}\ndef f(x): return R()",
    "standard error": "import os\nos.write(2, {}.encode(errors='surrogatepass'))\nos._exit(3)",
    "syntax error": "def f(x): exec('def g(): nonlocal ' + {})",
}
ENDS = {reward_pb2.OUTCOME_RUNTIME_ERROR, reward_pb2.OUTCOME_INCORRECT, reward_pb2.OUTCOME_RESOURCE_EXCEEDED}
# With characters that need most bytes in UTF-8 and in JSON, that UTF-8 cannot encode, or that end a line or a string.
TEXTS = st.text(st.characters() | st.sampled_from("\ud800\udfff\0\n\U0001f600"), max_size=30)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def served() -> AsyncIterator[Running]:
    async with serving() as running:
        yield running


def item(name: str, program: str, test_program: str = "") -> reward_pb2.ScoreItem:
    reference = reward_pb2.Reference(entry_point="f", test_program=test_program)
    if not test_program:
        reference.test_cases.add(input="[1]", output="2")
    return reward_pb2.ScoreItem(
        item_id=name, completion=f"```python\n{program}\n```", reference=reference, verifiers=[spec("code")]
    )


async def answers(served: Running, items: list[reward_pb2.ScoreItem], streamed: bool) -> dict[str, reward_pb2.Score]:
    """The scores by name; there are as many as items."""
    if streamed:
        call = served.stub.ScoreStream(iter([reward_pb2.ScoreStreamRequest(items=items)]), timeout=60)
        results = [result async for message in call for result in message.results]
    else:
        results = list((await served.stub.Score(reward_pb2.ScoreRequest(items=items), timeout=60)).results)
    assert {result.item_id: result.WhichOneof("result") for result in results} == dict.fromkeys(
        (one.item_id for one in items), "score"
    )
    return {result.item_id: result.score for result in results}


@given(text=TEXTS, times=st.sampled_from([1, 50_000]), streamed=st.booleans())
@example(text="\ud800", times=1, streamed=False)
@example(text="\ud800", times=1, streamed=True)
@settings(max_examples=12, deadline=None)
async def test_every_text_that_a_program_can_choose_is_answered_and_so_are_its_neighbors(served, text, times, streamed):
    items = [item(name, program.format(f"({text!a} * {times})")) for name, program in PROGRAMS.items()]
    items += [item(f"{one.item_id}, test program", _program(one), "assert f(1) == 2") for one in list(items)]
    items.insert(5, item("neighbor", "def f(x): return 2"))
    scores = await answers(served, items, streamed)
    assert scores.pop("neighbor").reward == 1.0
    for name, score in scores.items():
        assert score.reward == 0.0 and score.reason and len(score.reason) <= 1000, (name, score)
        assert score.outcome in ENDS, (name, score)


async def test_a_program_that_does_not_compile_may_fill_its_message_with_any_letters(served):
    """The letters take twelve bytes each in the judge's report."""
    (score,) = (await answers(served, [item("a", "def f(): nonlocal " + "\U00010400" * 1000)], False)).values()
    assert score.outcome == reward_pb2.OUTCOME_COMPILE_ERROR and "\U00010400" * 100 in score.reason


def _program(one: reward_pb2.ScoreItem) -> str:
    return one.completion.removeprefix("```python\n").removesuffix("\n```")
