"""`make gpu`: without a GPU no part passes, and the CPU forms of the parts pass."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import prove
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "deploy" / "local" / "tests"))

from launched import Pythons, preloaded_checkout  # noqa: E402

import fake_nvidia_smi  # noqa: E402 isort: skip (beside what `launched` imports)

pytestmark = pytest.mark.timeout(600)


def test_without_a_gpu_every_part_says_that_it_did_not_run(tmp_path, monkeypatch):
    fake_nvidia_smi.install(tmp_path / "bin", monkeypatch, status=9)
    command = [prove.python("client"), prove.__file__, "--json", tmp_path / "gpu.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 3 and not done.stderr, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert {(part["outcome"], part["detail"]) for part in parts} == {("not run", "no GPU")}
    assert all("not run: no GPU" in line for line in done.stdout.splitlines())


def test_on_the_cpu_all_but_speed_is_proven_with_the_same_code(tmp_path, monkeypatch):
    # vLLM's part runs concurrently with the others; all processes are preloaded.
    with ThreadPoolExecutor(1) as beside, closing(Pythons()) as pythons:
        preloaded = {"rollout": pythons["vllm"], "trainer": pythons["trainer"], "client": prove.python("client")}
        monkeypatch.setattr(prove, "python", lambda service: str(preloaded[service]))
        checkout = preloaded_checkout(tmp_path / "checkout", pythons)
        monkeypatch.setenv("PYTHONPATH", str(checkout / "deploy" / "local"))
        vllm = beside.submit(prove.prove, "d", cpu=True)
        parts = {part: prove.prove(part, cpu=True) for part in ("a", "b", "c", "e sleep")} | {"d": vllm.result()}
    assert {part.outcome for part in parts.values()} == {"passed"}, parts
    measured = parts["b"].measured
    assert measured["gb_per_second"] > 0 < measured["again_gb_per_second"]
    assert measured["killed_noticed_seconds"] < 5.5 and 4.5 < measured["stopped_noticed_seconds"] < 30
    assert set(parts["c"].measured) > {"exact", "gemini", "hybrid_parallel"}
    assert parts["e sleep"].measured["sleeps"] >= 5 and parts["e sleep"].measured["groups"] == 10
    assert parts["e sleep"].detail == "with the transformers engine: vLLM cannot sleep on a CPU"
    assert parts["d"].detail == "without sleep, which vLLM lacks here"
    kinds = parts["d"].measured["default"]["largest"]
    assert set(kinds) == {"as loaded", "over an update", "after the update", "masks"}
