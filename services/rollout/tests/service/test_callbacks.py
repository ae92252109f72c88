"""Callbacks are told of the begin and the end of each group, and one that fails ends the rollout."""

import json
from pathlib import Path

import pytest
from quartet.v1 import experience_pb2
from world import instance

from quartet_common.config import ConfigError
from quartet_rollout.callbacks import load_callbacks

SEEN = """
import json
from pathlib import Path
from quartet_rollout.callbacks import Callback

class Seen(Callback):
    def _write(self, *words):
        with Path(__file__).with_name("seen.jsonl").open("a") as file:
            file.write(json.dumps(words) + "\\n")

    def on_group_begin(self, lease):
        self._write("begin", lease.instance.instance_id)

    def on_group_end(self, end):
        texts = [one.text for one in end.transcript.completions] if end.transcript else []
        self._write("end", end.instance.instance_id, end.outcome, end.reason, texts)

    def close(self):
        self._write("close")

class Broken(Callback):
    def on_group_end(self, end):
        raise ValueError("no space")

class Stranger:
    pass

class Unmade(Callback):
    def __init__(self, path):
        pass
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "watch.py").write_text(SEEN)
    return tmp_path / "watch.py"


def seen(file: Path) -> list[list]:
    return [json.loads(line) for line in file.with_name("seen.jsonl").read_text().splitlines()]


async def test_callback_sees_begin_outcome_and_texts_of_a_group_and_the_end_of_the_rollout(world, file):
    await world.start(callbacks=[f"{file}:Seen"])
    await world.put(instance())
    assert await world.stop() == 0
    assert seen(file) == [["begin", "pass-0/0"], ["end", "pass-0/0", "accepted", "", ["aaa", "bbbb"]], ["close"]]


async def test_callback_sees_why_a_group_was_given_up(world, file):
    await world.start(callbacks=[f"{file}:Seen"])
    await world.release(instance(prompt=experience_pb2.Prompt(text="1+1=?", sampling={"min_tokens": 2})))
    await world.stop()
    (end,) = [line for line in seen(file) if line[0] == "end"]
    assert end[2] == "refused" and "sampling.min_tokens is 2" in end[3] and end[4] == []


async def test_callback_that_raises_ends_the_rollout_with_status_1_after_the_upload(world, file):
    await world.start(callbacks=[f"{file}:Broken"])
    await world.put(instance())
    await world.until(world.host.stopping.is_set)
    assert await world.stop() == 1


@pytest.mark.parametrize(
    ("name", "said"), [("Stranger", "a subclass of"), ("Unmade", "TypeError"), ("Missing", "Missing"), ("Seen", None)]
)
def test_load_callbacks_names_the_key_of_what_is_no_callback(file, name, said):
    if said is None:
        assert len(load_callbacks([f"{file}:{name}"])) == 1
        return
    with pytest.raises(ConfigError, match=rf"rollout\.callbacks\[0\].*{said}"):
        load_callbacks([f"{file}:{name}"])
