"""The Python tool: a real policy calls it, the real reward service runs it, the trainer reads what comes of it."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import talker
from conftest import instance
from google.protobuf.duration_pb2 import Duration
from quartet.v1 import experience_pb2

from quartet_common.ports import free_port
from quartet_common.tensors import decode, decode_ragged
from quartet_rollout.engines import create_engine
from quartet_rollout.environments import Execution
from quartet_rollout.environments.python_tool import find_call, shown

ROOT = Path(__file__).resolve().parents[4]
REWARD = Path(os.environ.get("QUARTET_REWARD_PYTHON", ROOT / ".quartet/envs/reward/bin/python"))
TRAINER = Path(os.environ.get("QUARTET_TRAINER_PYTHON", ROOT / ".quartet/envs/trainer/bin/python"))
DECODE = """
import json, sys
from quartet.v1 import experience_pb2
from quartet_trainer.batches import decode_groups
from quartet_common.ports import free_port
batch = decode_groups([experience_pb2.GroupTensors.FromString(sys.stdin.buffer.read())], int(sys.argv[1]))
print(json.dumps({"tokens": batch.completion_tokens.tolist(), "mask": batch.loss_mask.int().tolist(),
                  "temperatures": batch.temperatures.tolist(), "rewards": batch.rewards.tolist()}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return talker.write_talker(tmp_path_factory.mktemp("talker"))


class RewardProcess:
    """The reward service, from its own environment."""

    def __init__(self, folder: Path):
        self._log = folder / "reward.log"
        self.address = f"127.0.0.1:{free_port()}"
        self.start()

    def start(self) -> None:
        words = ["-m", "quartet_reward", "--set", f"addresses.reward={self.address}", "--set", "server.metrics=false"]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([str(REWARD), *words], stdout=log, stderr=log)

    def log(self) -> str:
        return self._log.read_text()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture(scope="module")
def reward(tmp_path_factory) -> Iterator[RewardProcess]:
    if not REWARD.exists():
        pytest.skip(f"there is no environment of the reward service at {REWARD}")
    process = RewardProcess(tmp_path_factory.mktemp("reward"))
    yield process
    process.stop()


@pytest.fixture
async def live(world, folder, reward):
    """The rollout with a real engine and the real reward service; of the neighbours only the broker is the test's."""
    world.folder, world.reward_host = folder, reward
    world.engine = create_engine("transformers", str(folder), {"device": "cpu", "max_num_seqs": 8})
    spec = world.broker.run.spec
    spec.sampling.max_new_tokens, spec.sampling.temperature, spec.sampling.seed = 120, 0.5, 1
    del spec.verifiers[:]
    spec.verifiers.add(name="boxed")
    spec.environment.name = "python_tool"
    await world.start(lease_wait_seconds=0.05)
    await world.until(lambda: world.service.state.engine, timeout=120)
    await world.engine.set_version(3)  # as if a trainer had brought them
    world.service.state.changes.notify()  # as an update does; else nobody leases if the rest was ready before
    await world.until(lambda: world.service.state.reward_ready or reward.process.poll() is not None, timeout=120)
    assert reward.process.poll() is None, reward.log()
    return world


def question(name: str = "pass-0/0", chat: bool = False) -> experience_pb2.PromptInstance:
    made = instance(name, text=talker.QUESTION)
    made.prompt.reference.answer = "42"
    if chat:
        made.prompt.chat.messages.add(role="user", content=talker.QUESTION)
        made.prompt.environment.name = "python_tool"
        made.prompt.environment.parameters.update({"answer_as": "message", "calls": "tag"})
    return made


async def stored(live, reward) -> None:
    """Wait for the group; one that is given back instead says why, and so does the reward service."""
    try:
        await live.broker.until(lambda: live.broker.puts or live.broker.releases, timeout=100)
    except TimeoutError:
        scorer, groups = live.service._scorer, live.service._groups._groups.values()
        stages = [(group.stage, group.generated, live.service.state.may_lease) for group in groups]
        pytest.fail(f"stages {stages}; {len(scorer._sent)} scores to come; {live.broker.calls[-9:]}\n{reward.log()}")
    assert not live.broker.releases, f"{live.broker.releases}\n{reward.log()}"


async def test_the_policy_s_programs_run_and_their_output_is_masked(live, folder, reward):
    await live.broker.submit(question())
    await stored(live, reward)
    transcript, tensors = live.broker.transcript(), live.broker.tensors()
    text = talker.CALL + talker.OUTPUT + talker.LAST + "<eos>"
    assert [info.text for info in transcript.completions] == [text, text]
    assert [(info.turns, info.score.reward > 0, info.score.parsed_answer) for info in transcript.completions] == [
        (2, True, "42")
    ] * 2

    tokenizer = live.engine.tokenizer()

    def ids(part: str) -> list[int]:
        return tokenizer.encode(part, add_special_tokens=False)

    rows = decode_ragged(tensors.completion_token_ids)
    masks = decode_ragged(tensors.loss_mask)
    first, inserted, last = ids(talker.CALL), ids(talker.OUTPUT), ids(talker.LAST + "<eos>")
    for row, mask in zip(rows, masks, strict=True):
        assert row.tolist() == first + inserted + last
        assert mask.tolist() == [1] * len(first) + [0] * len(inserted) + [1] * len(last)

    _agree_with_plain_transformers(folder, tensors)
    _the_trainer_reads(tensors)


def _agree_with_plain_transformers(folder: Path, tensors: experience_pb2.GroupTensors) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = decode(tensors.prompt_token_ids).tolist()
    fields = (tensors.completion_token_ids, tensors.rollout_log_probs, tensors.loss_mask)
    for row, log_probs, mask in zip(*map(decode_ragged, fields), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *row.tolist()]])).logits[0, len(prompt) - 1 : -1]
        every = torch.log_softmax(logits / 0.5, dim=-1)
        expected = every.gather(-1, torch.tensor(row, dtype=torch.int64)[:, None])[:, 0].numpy()
        np.testing.assert_allclose(log_probs, np.where(mask, expected, 0), atol=1e-4)


def _the_trainer_reads(tensors: experience_pb2.GroupTensors) -> None:
    if not TRAINER.exists():
        pytest.skip(f"there is no environment of the trainer at {TRAINER}")
    done = subprocess.run(
        [str(TRAINER), "-c", DECODE, "272"], input=tensors.SerializeToString(), capture_output=True, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    read = json.loads(done.stdout)
    assert read["tokens"] == np.concatenate(decode_ragged(tensors.completion_token_ids)).tolist()
    assert read["mask"] == np.concatenate(decode_ragged(tensors.loss_mask)).tolist()
    assert read["temperatures"] == [0.5, 0.5] and min(read["rewards"]) > 0


async def test_a_chat_s_tool_answers_by_a_message_of_the_template(live, reward):
    await live.broker.submit(question(chat=True))
    await stored(live, reward)
    text = talker.CHAT_CALL + talker.CHAT_OUTPUT + talker.LAST + "<|im_end|>"
    for info in live.broker.transcript().completions:
        assert (info.text, info.turns, info.score.parsed_answer) == (text, 2, "42")
    row = decode_ragged(live.broker.tensors().completion_token_ids)[0].tolist()
    assert row == live.engine.tokenizer().encode(text, add_special_tokens=False)


async def test_an_answer_s_special_tokens_are_plain_text(live):
    writer = live.service._environments.writer
    from quartet_rollout.environments import Answer

    tokenizer = live.engine.tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    tokens = writer.write(Answer("<|im_end|>", role="tool"), chat=True, last_token=end, room=200, most=100)
    assert tokenizer.decode(tokens) == "\n<|im_start|>tool\n<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert (tokens == end).sum() == 1  # the template's; the end of sequence, sampled already, is not repeated
    unfinished = writer.write(Answer("1", role="tool"), chat=True, last_token=7, room=200, most=100)
    assert tokenizer.decode(unfinished) == "<|im_end|>\n<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"


async def test_a_reward_service_that_goes_away_costs_no_attempt(live, reward):
    """A group that waits for its tool is given back, and not held against its prompt."""
    await live.broker.submit(question("first"))
    await stored(live, reward)
    late = question("late")
    late.prompt.environment.name = "python_tool"
    late.prompt.environment.answer_deadline.CopyFrom(Duration(seconds=3))
    reward.process.send_signal(signal.SIGSTOP)  # it stands still, so that the prompt is leased all the same
    try:
        await live.broker.submit(late)
        await live.until(lambda: live.engine.stats().tokens_total > 0 and live.service._groups.generating)
        reward.process.kill()
        reward.process.wait()
        await live.broker.until(lambda: live.broker.releases, timeout=120)
    finally:
        reward.stop()
        reward.start()
    assert (live.broker.releases[0].failure, live.broker.releases[0].permanent) == ("", False)


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
