"""vLLM's engine core in processes of its own: layers shared between two, and what becomes of one when another dies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from harness import PATIENCE, PROMPT
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(3 * PATIENCE)
OPTIONS = {"form": "async", "kv_cache_gib": 0.0625, "max_num_seqs": 8}
TOLERANCE = 1e-4


class Owner:
    """The process of vllm_owner.py."""

    def __init__(self, folder: Path, **options: Any) -> None:
        script = str(Path(__file__).with_name("vllm_owner.py"))
        self.process = subprocess.Popen(
            [sys.executable, script, json.dumps(OPTIONS | options), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.vllm = [psutil.Process(pid) for pid in self._hear()["processes"]]
        self.vllm = [process for process in self.vllm if "resource_tracker" not in " ".join(process.cmdline())]

    def order(self, **order: Any) -> dict:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self._hear()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        for process in self.vllm:
            if process.is_running():
                process.kill()

    def _hear(self) -> dict:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())


@pytest.fixture
def owner(request: pytest.FixtureRequest, models: dict) -> Iterator[Owner]:
    started = Owner(models[True, 0], **request.param)
    yield started
    started.stop()


@pytest.mark.parametrize("owner", [{"tensor_parallel_size": 2}], indirect=True, ids=["two workers"])
def test_two_workers_share_the_layers_and_take_new_weights_and_end_with_their_owner(
    owner: Owner, models: dict, tmp_path: Path
) -> None:
    for version, folder in ((-1, models[True, 0]), (5, models[True, 1])):
        if version >= 0:
            assert owner.order(do="update", folder=str(folder), files=str(tmp_path), version=version) == {"version": 5}
        made = owner.order(do="generate", prompt=PROMPT, length=20)
        assert made["spans"] == [[version, 0, len(made["tokens"])]]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *made["tokens"]]])).logits[0, len(PROMPT) - 1 : -1]
        assert logits.argmax(-1).tolist() == made["tokens"]
        expected = torch.log_softmax(logits, dim=-1).max(-1).values
        np.testing.assert_allclose(made["log_probs"], expected, atol=TOLERANCE)
    assert len(owner.vllm) == 3  # The engine core and two workers.
    owner.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(owner.vllm, timeout=PATIENCE)
    assert not alive


@pytest.mark.parametrize("owner", [{}], indirect=True, ids=["one worker"])
def test_an_engine_process_that_dies_fails_the_engine(owner: Owner) -> None:
    assert len(owner.vllm) == 1
    owner.vllm[0].kill()
    failure = owner.order(do="generate", prompt=PROMPT, length=20)["error"]
    assert failure.startswith("the vllm engine failed: ")
    assert owner.order(do="generate", prompt=PROMPT, length=20)["error"] == failure
