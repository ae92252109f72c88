"""Where the answer stands in a completion."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quartet.v1 import reward_pb2
from reward_samples import at_once, begun, item, scorer, spec

from quartet_common.errors import ContractError
from quartet_reward.answer_extraction import (
    after_thinking,
    fault_of_think_answer_form,
    last_boxed,
    without_trailing_special_tokens,
)
from quartet_reward.servicer import in_strides


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{8}", "8"),
        (r"first \boxed{7}, then \boxed{8}.", "8"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{8}}", r"\boxed{8}"),
        (r"\boxed{7} and \boxed{8", "7"),
        (r"\boxed{8", None),
        (r"Put it as \boxed 5$ first. Then $\boxed 7$.", "7"),
        (r"\boxed x+1", None),
        (r"\boxed{8} or maybe $\boxed{9}$? But wait", "8"),
    ],
)
def test_the_last_complete_box_counts(text, answer):
    assert last_boxed(text) == answer


@pytest.mark.parametrize(
    ("text", "prompt", "rest"),
    [
        (r"<think>\boxed{7}</think>\boxed{8}", "", r"\boxed{8}"),
        (r"<think>\boxed{7}", "", ""),
        (r"\boxed{8}<think>again \boxed{9}", "", r"\boxed{8}"),
        (r"two and two</think>\boxed{8}", "", r"\boxed{8}"),
        ("[THINK]7[/THINK]8", "", "8"),
        ("<think>the tag </thinking> 7", "", ""),
        ("<reasoning>7 <think> 7</reasoning>8", "", "8"),
        ("<think>a</think>7<think>b</think>8<|channel|>analysis", "", "8"),
        ("<|channel|>analysis<|message|>7<|end|><|channel|>final<|message|>8", "", "8"),
        ("<|channel|>analysis<|message|>7", "", ""),
        ("7", "<|im_start|>assistant\n<think>\n", ""),
        ("7</think>8", "<|im_start|>assistant\n<think>\n", "8"),
        ("7</thinking>8", "<|im_start|>assistant\n<think>\n", ""),
        ("7", "<|start|>assistant<|channel|>analysis<|message|>", ""),
        ("7", "…\n<think>\nFirst, I add", ""),
        ("8", "Begin with <think>.<|im_end|>\n<|im_start|>assistant\n", "8"),
        ("8", "<|im_start|>assistant\n<think>\n\n</think>\n\n", "8"),
        ("8", "Write\n<think>\nyour thought\n<|im_end|>\n<|im_start|>assistant\n", "8"),
    ],
)
def test_what_stands_in_a_thought_is_no_answer(text, prompt, rest):
    assert after_thinking(text, prompt) == rest


def test_a_parameter_names_more_markers():
    one = item("<plan>7</plan>8", verifiers=[spec("exact", thought_markers=[["<plan>", "</plan>"]])])
    assert at_once(one).score.outcome == reward_pb2.OUTCOME_CORRECT
    one = item(r"<plan>\boxed{8}", verifiers=[spec("boxed", thought_markers=[["<plan>", "</plan>"]])])
    assert at_once(one).score.outcome == reward_pb2.OUTCOME_MALFORMED


def test_think_answer_tags_takes_other_tags():
    tags = ["<reasoning>", "</reasoning>", "<final>", "</final>"]
    for text, outcome in (
        ("<reasoning>2+6</reasoning><final>8</final>", reward_pb2.OUTCOME_CORRECT),
        ("<think>2+6</think><answer>8</answer>", reward_pb2.OUTCOME_MALFORMED),
        ("<reasoning></reasoning><final>8</final> indeed", reward_pb2.OUTCOME_MALFORMED),
    ):
        one = item(text, verifiers=[spec("think_answer_tags", tags=tags)])
        assert at_once(one).score.outcome == outcome, text


@pytest.mark.parametrize("tags", [["<a>", "</a>", "<a>", "</b>"], ["<a>", "<a>>", "<b>", "</b>"], ["a", "b", "c"]])
def test_tags_that_cannot_be_told_apart_are_refused(tags):
    with pytest.raises(ContractError, match=r"parameters\.tags.*(allowed|none may be)"):
        at_once(item("8", verifiers=[spec("think_answer_tags", tags=tags)]))


OPENED = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("verifier", "completion", "prompt", "outcome"),
    [
        (spec("think_answer_tags"), "7?</think><answer>8</answer>", OPENED, "CORRECT"),
        (spec("think_answer_tags"), "7?</think><answer>8</answer>", "", "MALFORMED"),
        (spec("think_answer_tags"), "<think>7?</think><answer>8</answer>", OPENED, "CORRECT"),
        (spec("format"), "7?</think><answer>9</answer>", OPENED, "CORRECT"),
        (spec("format"), "<think></think><answer> </answer>", "", "MALFORMED"),
        (spec("format", form="boxed"), r"\boxed{ }", "", "MALFORMED"),
        (spec("format", form="boxed"), r"\boxed{8}", OPENED, "MALFORMED"),
        (spec("boxed"), r"\boxed{8}, or", OPENED, "MALFORMED"),
        (spec("boxed"), r"7?</think>\boxed{8}", OPENED, "CORRECT"),
        (spec("math"), "The answer is 8.", OPENED, "MALFORMED"),
        (spec("math"), "7?</think>The answer is 8.", OPENED, "CORRECT"),
        (spec("exact"), "7?</think>\n8", OPENED, "CORRECT"),
        (spec("exact", answer_in="answer_tags"), "<answer>8</answer>", OPENED, "MALFORMED"),
    ],
)
def test_each_verifier_reads_what_follows_a_thought_that_the_prompt_opened(verifier, completion, prompt, outcome):
    found = at_once(item(completion, verifiers=[verifier], prompt=prompt)).score.outcome
    assert reward_pb2.Outcome.Name(found) == f"OUTCOME_{outcome}"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<think></think>\n<answer>8</answer>", ""),
        ("<answer>8</answer>", "<think> stands 0 times"),
        ("<think>a</think><answer>8</answer><answer>8</answer>", "<answer> stands 2 times"),
        ("<think>a<answer></think>8</answer>", "<answer> stands too early"),
        ("<think>a</think><answer>8</answer> indeed", "text follows </answer>"),
        ("<think>a</think><answer> </answer>", "the answer is empty"),
    ],
)
def test_the_fault_of_the_form_is_named(text, fault):
    assert fault_of_think_answer_form(text).partition(";")[0] == fault


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["z", "zz", "az", "<eos>", "s>", " ", "\n", "8"]), max_size=12).map("".join),
    st.lists(st.sampled_from(["z", "zz", "az", "<eos>", "s>", "", "(", "+"]), max_size=4),
)
def test_special_tokens_are_taken_off_one_after_another(text, special_tokens):
    expected = text.rstrip()
    while token := next((token for token in special_tokens if token and expected.endswith(token)), None):
        expected = expected.removesuffix(token).rstrip()
    assert without_trailing_special_tokens(text, special_tokens) == expected


async def turns_until(done: asyncio.Task) -> int:
    """Return how often others had their turn in the event loop until a task was done."""
    turns = 0
    while not done.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


@pytest.mark.parametrize(
    ("flood", "verifier"),
    [
        ("<|im_end|>", spec("think_answer_tags")),
        ("É", spec("exact", ignore_case=True)),
    ],
    ids=["special tokens", "case"],
)
async def test_the_event_loop_goes_on_while_a_long_text_is_read(flood, verifier):
    scoring = begun(item(flood * (20_000_000 // len(flood)), verifiers=[verifier]))
    assert scoring.result is None, "a thread's"
    reading = asyncio.ensure_future(scoring.finish())
    assert await turns_until(reading) > 20
    assert reading.result().score.outcome in (reward_pb2.OUTCOME_MALFORMED, reward_pb2.OUTCOME_INCORRECT)


async def test_the_event_loop_goes_on_between_texts_that_are_long_together():
    scores = scorer()
    items = [item(r"\boxed{1} " * 6_000, answer="1", verifier="math") for _ in range(8)]

    async def score_all() -> list:
        return [scores.begin(one, "item", size) async for _, one, size in in_strides(items)]

    assert await turns_until(asyncio.ensure_future(score_all())) >= len(items) // 2
