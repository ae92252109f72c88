"""The environment of examples/extensions, installed as a package would be, and played."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
from doubles import SpeakingEngine
from world import instance

from quartet_common.tensors import decode_ragged

EXTENSIONS = Path(__file__).resolve().parents[4] / "examples" / "extensions"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The example's module and its entry point, on the path of this process."""
    points = tomllib.loads((EXTENSIONS / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, point),) = points["quartet.environments"].items()
    point = point.replace("quartet_extensions.guess_number", "my_environments")
    site = tmp_path / "site"
    information = site / "my_environments-1.0.dist-info"
    information.mkdir(parents=True)
    (site / "my_environments.py").write_text((EXTENSIONS / "quartet_extensions" / "guess_number.py").read_text())
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: my-environments\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[quartet.environments]\n{name} = {point}\n")
    monkeypatch.syspath_prepend(str(site))
    yield
    sys.modules.pop("my_environments", None)


def guess(text: str) -> str:
    """50, then better ones by what the environment said."""
    low, high = 1, 100
    for number, word in re.findall(r"(\d+)\? Too (low|high)", text):
        low, high = (int(number) + 1, high) if word == "low" else (low, int(number) - 1)
    return f"{(low + high) // 2}?" if "?" in text else "hm?"


async def test_the_examples_environment_plays(installed, world):
    world.engine = SpeakingEngine(guess)
    world.engine.policy_version = 4
    spec = world.broker.run.spec
    spec.sampling.max_new_tokens = 300
    spec.environment.name = "guess_number"
    await world.start()
    await world.until(lambda: "environment.guess_number" in world.host.capabilities)
    made = instance(text="guess ")
    made.prompt.reference.answer = "37"
    await world.put(made)
    info = world.broker.transcript().completions[0]
    assert info.text == "hm? A number, please. 50? Too high. 25? Too low. 37?" and info.turns == 4
    mask = decode_ragged(world.broker.tensors().loss_mask)[0]
    assert "".join(letter for letter, one in zip(info.text, mask, strict=True) if one) == "hm?50?25?37?"
