"""The run file for eight GPUs in examples/mathematics: its data and the memory check."""

import json
import subprocess
import sys

import pytest
from launched import ROOT, hollow_model

from quartet_common.config import load_config
from quartet_common.gpus import GIB, Gpu
from quartet_local.config import SERVICES, LauncherSection
from quartet_local.memory import check_memory
from quartet_local.placement import place

FOLDER = ROOT / "examples" / "mathematics"
RUN_FILE = FOLDER / "run.toml"
PARAMETERS = 3_085_938_688
"""Of Qwen2.5-3B."""
ROWS = {
    "train.jsonl": {"question": "How many?", "answer": "48 + 1000 = <<48+1000=1048>>1048\n#### 1,048"},
    "hard.jsonl": {"problem": "What is $x$?", "solution": "First \\boxed{1}, so $x = \\boxed{\\frac{1}{2}}$."},
    "test.jsonl": {"problem": "What is $y$?", "answer": "(3, \\frac{\\pi}{2})"},
}


@pytest.fixture
def data(tmp_path):
    """The folder that prepare.py makes from a problem of each form."""
    for name, row in ROWS.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    made, (first, second, test) = tmp_path / "made", (tmp_path / name for name in ROWS)
    command = [sys.executable, FOLDER / "prepare.py", made, "--train", first, second, "--heldout", f"math500={test}"]
    subprocess.run(command, check=True)
    return made


def test_problems_of_each_form_are_read(data, tmp_path):
    read = [json.loads(line) for name in ("train", "math500") for line in (data / f"{name}.jsonl").open()]
    assert [row["gt_answer"] for row in read] == ["1048", "\\frac{1}{2}", "(3, \\frac{\\pi}{2})"]
    (tmp_path / "train.jsonl").write_text('{"question": "How many?", "answer": "many"}\n')
    command = [sys.executable, FOLDER / "prepare.py", data, "--train", tmp_path / "train.jsonl"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.endswith("train.jsonl, line 1: no problem with an answer; keys are question, answer\n")


def test_eight_gpus_of_80_gb_hold_it(tmp_path):
    settings = [f"model.path={hollow_model(tmp_path, PARAMETERS)}"]
    gpus = [Gpu(index, f"GPU-{index}", "H100", 80 * GIB, 79 * GIB, "580.95.05") for index in range(8)]
    config = load_config("launcher", LauncherSection, RUN_FILE, settings)
    services = place(config, SERVICES, gpus, settings)
    seen = [service.environment["CUDA_VISIBLE_DEVICES"] for service in services if service.kind == "rollout"]
    assert seen == ["0", "1", "2", "3"]
    check_memory(services, config, settings)
