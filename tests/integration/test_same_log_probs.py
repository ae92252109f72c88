"""The trainer has the log-probs that the transformers engine gave its tokens, for families that are easily computed
otherwise. The engines' own tests compare vLLM with plain transformers.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from by_hand import ROOT
from preloaded import Pythons
from started import Answering

HERE = Path(__file__).parent
PROMPT = [18, 11, 19, 11, 17]
CONTEXTS = {"Phi3": 32, "Llama": 64, "Qwen2": 64, "Gemma2": 64, "Cohere": 64, "Granite": 64}
"""The longest sequence of each; for Phi3 up to where its longrope frequencies change, for Llama its dynamic ones."""
SECONDS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def log_probs(pythons: Pythons, folder: Path) -> Iterator[Callable[[str, list[int]], list[float]]]:
    """The trainer's, of a family's completion; its process has left the models in `folder`."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "examples" / "arithmetic")}
    program = [pythons["trainer"], HERE / "families_in_trainer.py", folder]
    with closing(Answering(program, folder / "trainer.log", env=variables)) as process:
        assert process.hear() == "ready"
        yield lambda family, tokens: process.order(family=family, tokens=PROMPT + tokens, prompt=len(PROMPT))


@pytest.mark.timeout(2 * SECONDS)
def test_log_probs(pythons: Pythons, folder: Path, log_probs: Callable[[str, list[int]], list[float]]) -> None:
    program = (pythons["rollout"], HERE / "families_in_rollout.py", json.dumps(PROMPT))
    made = subprocess.run(
        [*program, *(folder / family for family in CONTEXTS)],
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert made.returncode == 0, made.stderr[-4000:]
    for (family, longest), line in zip(CONTEXTS.items(), made.stdout.splitlines(), strict=True):
        context, tokens, found = json.loads(line)
        assert context == longest, family
        assert found == pytest.approx(log_probs(family, tokens), abs=1e-4), family
