"""The Python tool: a real policy calls it, and the real reward service runs it."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import talker
import torch
from conftest import instance
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import experience_pb2
from transformers import AutoModelForCausalLM, AutoTokenizer

from quartet_common.ports import free_port
from quartet_common.tensors import decode, decode_ragged
from quartet_rollout.engines import create_engine
from quartet_rollout.environments import Answer, Execution
from quartet_rollout.environments.answers import AnswerWriter
from quartet_rollout.environments.python_tool import find_call, shown

ROOT = Path(__file__).resolve().parents[4]
REWARD = Path(os.environ.get("QUARTET_REWARD_PYTHON", ROOT / ".quartet/envs/reward/bin/python"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return talker.write_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture
def reward(tmp_path) -> Iterator[SimpleNamespace]:
    """The reward service, from its own environment."""
    if not REWARD.exists():
        pytest.skip(f"there is no environment of the reward service at {REWARD}")
    address = f"127.0.0.1:{free_port()}"
    words = ["-m", "quartet_reward", "--set", f"addresses.reward={address}", "--set", "server.metrics=false"]
    log = tmp_path / "reward.log"
    with log.open("wb") as output:
        process = subprocess.Popen([str(REWARD), *words], stdout=output, stderr=output)
    yield SimpleNamespace(address=address, process=process, log=log.read_text)
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
async def live(world, folder, reward):
    """The rollout with a real engine and the real reward service; of the neighbours only the broker is the test's."""
    world.folder, world.reward_host = folder, reward
    world.engine = create_engine("transformers", str(folder), {"place": "thread", "device": "cpu", "max_num_seqs": 8})
    spec = world.broker.run.spec
    spec.sampling.max_new_tokens, spec.sampling.temperature, spec.sampling.seed = 120, 0.5, 1
    del spec.verifiers[:]
    spec.verifiers.add(name="boxed")
    spec.environment.name = "python_tool"
    await world.start()
    await world.until(lambda: world.service.state.engine, timeout=120)
    await world.engine.set_version(3)  # as if a trainer had brought them
    world.service.state.changes.notify()  # as an update does; else nobody leases if the rest was ready before
    await world.until(lambda: world.service.state.reward_ready or reward.process.poll() is not None, timeout=120)
    assert reward.process.poll() is None, reward.log()
    return world


def question(name: str) -> experience_pb2.PromptInstance:
    made = instance(name, text=talker.QUESTION)
    made.prompt.reference.answer = "42"
    return made


async def stored(live, reward, asked) -> tuple[experience_pb2.GroupTranscript, experience_pb2.GroupTensors]:
    """Ask, and wait for the group; one that is given back instead says why, and so does the reward service."""
    before = len(live.broker.puts)
    await live.broker.submit(asked)
    await live.broker.until(lambda: len(live.broker.puts) > before or live.broker.releases, timeout=100)
    assert not live.broker.releases, f"{live.broker.releases}\n{reward.log()}"
    return live.broker.transcript(-1), live.broker.tensors(-1)


async def test_the_policy_s_programs_run_and_their_output_is_masked(live, folder, reward):
    tokenizer = live.engine.tokenizer()
    transcript, tensors = await stored(live, reward, question("text"))
    text = talker.CALL + talker.OUTPUT + talker.LAST + "<eos>"
    for info in transcript.completions:
        assert (info.text, info.turns, info.score.parsed_answer) == (text, 2, "42") and info.score.reward > 0
    first, inserted, last = (
        tokenizer.encode(part, add_special_tokens=False) for part in (talker.CALL, talker.OUTPUT, talker.LAST + "<eos>")
    )
    rows, masks = decode_ragged(tensors.completion_token_ids), decode_ragged(tensors.loss_mask)
    for row, mask in zip(rows, masks, strict=True):
        assert row.tolist() == first + inserted + last
        assert mask.tolist() == [1] * len(first) + [0] * len(inserted) + [1] * len(last)
    _agree_with_plain_transformers(folder, tensors)

    # The answer to a chat is a message of the template.
    chat = question("chat")
    chat.prompt.chat.messages.add(role="user", content=talker.QUESTION)
    chat.prompt.environment.name = "python_tool"
    chat.prompt.environment.parameters.update({"answer_as": "message", "calls": "tag"})
    transcript, tensors = await stored(live, reward, chat)
    text = talker.CHAT_CALL + talker.CHAT_OUTPUT + talker.LAST + "<|im_end|>"
    for info in transcript.completions:
        assert (info.text, info.turns, info.score.parsed_answer) == (text, 2, "42")
    row = decode_ragged(tensors.completion_token_ids)[0].tolist()
    assert row == tokenizer.encode(text, add_special_tokens=False)

    # A group that waits for its tool when the reward service goes away is given back, and not held against its prompt.
    late = question("late")
    late.prompt.environment.name = "python_tool"
    late.prompt.environment.answer_deadline.CopyFrom(Duration(seconds=3))
    reward.process.send_signal(signal.SIGSTOP)  # it stands still, so that the prompt is leased all the same
    await live.broker.submit(late)
    await live.until(lambda: live.service._groups.generating)
    reward.process.kill()
    await live.broker.until(lambda: live.broker.releases, timeout=120)
    assert (live.broker.releases[0].failure, live.broker.releases[0].permanent) == ("", False)


def _agree_with_plain_transformers(folder: Path, tensors: experience_pb2.GroupTensors) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = decode(tensors.prompt_token_ids).tolist()
    fields = (tensors.completion_token_ids, tensors.rollout_log_probs, tensors.loss_mask)
    for row, log_probs, mask in zip(*map(decode_ragged, fields), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *row.tolist()]])).logits[0, len(prompt) - 1 : -1]
        every = torch.log_softmax(logits / 0.5, dim=-1)
        expected = every.gather(-1, torch.tensor(row, dtype=torch.int64)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(log_probs, np.where(mask, expected, 0), atol=1e-4)


def test_an_answer_s_special_tokens_are_plain_text(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    writer = AnswerWriter(tokenizer)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = writer.write(Answer("<|im_end|>", role="tool"), chat=True, last_token=end, room=200, most=100)
    assert tokenizer.decode(tokens) == "\n<|im_start|>tool\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert (tokens == end).sum() == 1  # the template's; the end of sequence, sampled already, is not repeated
    unfinished = writer.write(Answer("1", role="tool"), chat=True, last_token=7, room=200, most=100)
    assert tokenizer.decode(unfinished) == "<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"


FENCE = "so:\n```python\nprint(1)\n```"


@pytest.mark.parametrize(
    ("text", "calls", "found"),
    [
        (FENCE, "either", ("fence", "print(1)")),
        (FENCE + "\n", "fence", ("fence", "print(1)")),
        (FENCE, "tag", ("fence", None)),
        ("```py\na\n```\nthen\n```python3\nb\nc\n```\n", "fence", ("fence", "b\nc")),
        ("```text\nprint(1)\n```", "either", ("fence", None)),
        (FENCE + " is it", "either", ("fence", None)),
        ("print(1)\n```", "either", ("fence", None)),
        ("<tool>\nprint(1)\n</tool>", "either", ("tag", "print(1)")),
        ("<tool>a</tool> <tool>b</tool>\n", "tag", ("tag", "b")),
        ("b</tool>", "tag", ("tag", None)),
        ("<tool>a</tool>", "fence", ("fence", None)),
        ("", "either", ("fence", None)),
    ],
)
def test_the_call_is_what_a_turn_ends_with(text, calls, found):
    assert find_call(text, calls) == found


@pytest.mark.parametrize(
    ("outcome", "code", "stdout", "stderr", "text"),
    [
        ("exited", 0, "42\n", "", "42"),
        ("exited", 0, "", "warned", "[no output]"),
        ("exited", 1, "1\n", "Traceback\nZeroDivisionError: x\n", "1\nTraceback\nZeroDivisionError: x"),
        ("exited", 3, "", "", "[exit status 3]"),
        ("timed_out", 0, "1\n", "", "1\n[stopped after 10 s]"),
        ("memory_exceeded", 0, "", "", "[stopped: memory exceeded]"),
    ],
)
def test_what_the_policy_reads_of_an_execution(outcome, code, stdout, stderr, text):
    assert shown(Execution(outcome, code, stdout, stderr, 0.1), 10.0) == text
