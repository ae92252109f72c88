"""`make gpu` here: without a GPU nothing passes, and what has a form for the CPU runs and passes."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "deploy" / "local" / "tests"))

from launched import Pythons, preloaded_checkout  # noqa: E402

import fake_nvidia_smi  # noqa: E402 isort: skip (beside what `launched` imports)

pytestmark = pytest.mark.timeout(600)


def prove(folder: Path, *arguments: str) -> tuple[int, dict[str, dict]]:
    """Return the exit status and the parts of the JSON file, by name."""
    python = ROOT / ".quartet" / "envs" / "client" / "bin" / "python"
    command = [str(python), str(ROOT / "tests" / "gpu" / "prove.py"), *arguments, "--json", str(folder / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert not done.stderr, done.stderr
    parts = json.loads((folder / "gpu.json").read_text())["parts"]
    assert all(part["outcome"] in line for part, line in zip(parts, done.stdout.splitlines(), strict=True))
    return done.returncode, {part["part"]: part for part in parts}


def test_without_a_gpu_every_part_says_that_it_did_not_run(tmp_path, monkeypatch):
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch, status=9)
    status, parts = prove(tmp_path)
    assert status == 3 and {(part["outcome"], part["detail"]) for part in parts.values()} == {("not run", "no GPU")}


def test_on_the_cpu_all_but_speed_is_proven_with_the_same_code(tmp_path, monkeypatch):
    # vLLM's part is one process after the other, and so is what runs beside it; services begin with their imports done.
    with ThreadPoolExecutor(1) as beside, closing(Pythons()) as pythons:
        vllm = beside.submit(prove, tmp_path / "vllm", "--cpu", "d")
        checkout = preloaded_checkout(tmp_path / "checkout", pythons)
        monkeypatch.setenv("PYTHONPATH", str(checkout / "deploy" / "local"))
        status, parts = prove(tmp_path, "--cpu", "a", "b", "c", "e sleep")
        vllm_status, vllm_parts = vllm.result()
    assert status == 0, parts
    measured = parts["b"]["measured"]
    assert measured["gb_per_second"] > 0 < measured["again_gb_per_second"]
    assert measured["killed_noticed_seconds"] < 5.5 and 4.5 < measured["stopped_noticed_seconds"] < 30
    assert set(parts["c"]["measured"]) > {"exact", "gemini", "hybrid_parallel"}
    assert parts["e sleep"]["measured"]["sleeps"] >= 5 and parts["e sleep"]["measured"]["groups"] == 10
    assert parts["e sleep"]["detail"] == "with the transformers engine: vLLM cannot sleep on a CPU"
    assert vllm_status == 0, vllm_parts
    assert vllm_parts["d"]["detail"] == "without sleep, which vLLM lacks here"
    kinds = vllm_parts["d"]["measured"]["default"]["largest"]
    assert set(kinds) == {"as loaded", "over an update", "after the update", "masks"}
