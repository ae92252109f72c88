"""The Python tool: what is a call, and what the policy reads. tests/integration/test_tools.py has real programs run."""

from types import SimpleNamespace

import pytest
import talker
from doubles import SpeakingEngine
from quartet.v1 import experience_pb2
from transformers import AutoTokenizer
from world import instance

from quartet_rollout.environments import Answer, Execution
from quartet_rollout.environments.conversation import AnswerWriter
from quartet_rollout.environments.python_tool import PythonTool, PythonToolParameters, find_call, shown


def test_an_answer_s_special_tokens_are_plain_text(tmp_path):
    talker.write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    writer = AnswerWriter(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = writer.write(
        Answer("<|im_end|>", role="tool"), chat=experience_pb2.Chat(), last_token=end, room=200, most=100
    )
    assert tokenizer.decode(tokens) == "\n<|im_start|>tool\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert (tokens == end).sum() == 1  # the template's; the end of sequence, sampled already, is not repeated
    unfinished = writer.write(Answer("1", role="tool"), chat=experience_pb2.Chat(), last_token=7, room=200, most=100)
    assert tokenizer.decode(unfinished) == "<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"


async def test_a_group_whose_tool_is_away_is_not_held_against_its_prompt(world):
    world.engine = SpeakingEngine(lambda text: "```python\nprint(1)\n```")
    world.engine.policy_version = 0
    late = instance()
    late.prompt.environment.name = "python_tool"
    late.prompt.environment.answer_deadline.FromSeconds(1)
    release = await world.release(late)
    assert (release.failure, release.permanent) == ("", False)


FENCE = "so:\n```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("text", "calls", "found"),
    [
        (FENCE + "\n", "fence", ("fence", "print(1)")),
        (FENCE, "tag", ("fence", None)),
        ("```py\na\n```\nthen\n```python3\nb\nc\n```\n", "fence", ("fence", "b\nc")),
        ("```text\nprint(1)\n```", "either", ("fence", None)),
        (FENCE + " is it", "either", ("fence", None)),
        ("<tool>a</tool> <tool>b</tool>\n", "either", ("tag", "b")),
        ("b</tool>", "tag", ("tag", None)),
    ],
)
def test_the_call_is_what_a_turn_ends_with(text, calls, found):
    assert find_call(text, calls) == found


@pytest.mark.parametrize(
    ("outcome", "code", "stdout", "stderr", "text"),
    [
        ("exited", 0, "", "warned", "[no output]"),
        ("exited", 1, "1\n", "Traceback\nZeroDivisionError: x\n", "1\nTraceback\nZeroDivisionError: x"),
        ("exited", 3, "", "", "[exit status 3]"),
        ("timed_out", 0, "1\n", "", "1\n[stopped after 10 s]"),
    ],
)
def test_what_the_policy_reads_of_an_execution(outcome, code, stdout, stderr, text):
    assert shown(Execution(outcome, code, stdout, stderr, 0.1), 10.0) == text


@pytest.mark.parametrize(
    ("call", "parameters", "answer"),
    [
        ("```python\nprint(42)\n```\n", {}, Answer("```output\n42\n```\n")),
        ("<tool>print(42)</tool>", {}, Answer("\n<result>\n42\n</result>\n")),
        ("<tool>print(42)</tool>", {"answer_as": "message"}, Answer("42", role="tool")),
    ],
)
async def test_the_answer_has_the_form_of_the_call(call, parameters, answer):
    async def execute(program: str, **limits) -> Execution:
        assert program == "print(42)" and limits["timeout_seconds"] == 10
        return Execution("exited", 0, "42\n", "", 0.1)

    tools = SimpleNamespace(execute=execute)
    episode = PythonTool().begin(SimpleNamespace(run_id="demo"), PythonToolParameters(**parameters), tools)
    assert await episode.answer(SimpleNamespace(text=call, stop="")) == answer
