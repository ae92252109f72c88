"""vLLM's engine core and its workers in processes of their own: layers shared between two, and their owner's end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from engine_owner import Owner
from harness import PATIENCE, PROMPT
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(3 * PATIENCE)
OPTIONS = {"kv_cache_gib": 0.0625, "max_num_seqs": 8, "tensor_parallel_size": 2}
TOLERANCE = 1e-4


@pytest.fixture
def owner(models: dict) -> Iterator[Owner]:
    started = Owner("vllm", models[True, 0], **OPTIONS)
    yield started
    started.stop()


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
    assert len(owner.processes) == 3  # The engine core and two workers.
    owner.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(owner.processes, timeout=PATIENCE)
    assert not alive
