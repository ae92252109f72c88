"""The environment of docs/environments.md, installed as a package would be, and played."""

import re
import sys
from pathlib import Path

import pytest
from doubles import SpeakingEngine
from quartet.v1 import experience_pb2
from world import instance

from quartet_common.tensors import decode_ragged

PAGE = Path(__file__).resolve().parents[4] / "docs" / "environments.md"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with the page's code and its entry point, on the path of this process."""
    page = PAGE.read_text()
    (code,) = re.findall(r"```python\n(\"\"\"Guess.*?)\n```", page, re.DOTALL)
    (point,) = re.findall(r'\[project.entry-points."quartet.environments"\]\n(.*?)\n```', page, re.DOTALL)
    site = tmp_path / "site"
    information = site / "my_environments-1.0.dist-info"
    information.mkdir(parents=True)
    (site / "my_environments.py").write_text(code)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-environments\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[quartet.environments]\n{point.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("my_environments", None)


def guess(text: str) -> str:
    """50, then better ones by what the environment said."""
    low, high = 1, 100
    for number, word in re.findall(r"(\d+)\? Too (low|high)", text):
        low, high = (int(number) + 1, high) if word == "low" else (low, int(number) - 1)
    return f"{(low + high) // 2}?" if "?" in text else "hm?"


async def test_the_page_s_environment_plays(installed, world):
    world.engine = SpeakingEngine(guess)
    world.engine.policy_version = 4
    spec = world.broker.run.spec
    spec.sampling.max_new_tokens = 300
    spec.environment.name = "guess"
    await world.start()
    await world.until(lambda: "environment.guess" in world.host.capabilities)
    made = instance(text="guess ")
    made.prompt.reference.answer = "37"
    bad = instance("bad", text="guess ")
    bad.prompt.reference.answer = "thirty-seven"
    await world.broker.submit(made, bad)
    await world.broker.until(lambda: world.broker.puts and world.broker.releases)
    asked = "hm? A number, please. "
    low_high = "50? Too high. 25? Too low. 37?"
    info = world.broker.transcript().completions[0]
    assert (info.text, info.turns) == (asked + low_high, 4)
    assert info.finish_reason == experience_pb2.FINISH_REASON_STOP
    mask = decode_ragged(world.broker.tensors().loss_mask)[0]
    generated = "".join(letter for letter, one in zip(info.text, mask, strict=True) if one)
    assert generated == "hm?50?25?37?"
    release = world.broker.releases[0]
    assert release.permanent and release.failure == "environment: the reference answer is no number"
