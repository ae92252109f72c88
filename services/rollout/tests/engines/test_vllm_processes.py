"""vLLM's engine core and its workers in processes of their own: layers shared between two, and their owner's end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_owner import Owner
from harness import PATIENCE, PROMPT, Sender
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(3 * PATIENCE)
OPTIONS = {"kv_cache_gib": 0.0625, "max_num_seqs": 8, "tensor_parallel_size": 2}
TOLERANCE = 1e-4


@pytest.fixture
def owner(models: dict, forked: Any, tmp_path: Path) -> Iterator[Owner]:
    with forked(), closing(Owner("vllm", models[True, 0], tmp_path / "log", **OPTIONS)) as started:
        yield started


def check(folder: Path, made: dict, begin: int = 0) -> None:
    """Compare tokens and log-probs from `begin` on with plain transformers on the folder's weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *made["tokens"]]])).logits[0, len(PROMPT) - 1 : -1][begin:]
    assert logits.argmax(-1).tolist() == made["tokens"][begin:]
    expected = torch.log_softmax(logits, dim=-1).max(-1).values
    np.testing.assert_allclose(made["log_probs"][begin:], expected, atol=TOLERANCE)


def test_two_workers_share_the_layers_and_take_new_weights_and_end_with_their_owner(
    owner: Owner, models: dict, sender: Sender
) -> None:
    made = owner.order(do="generate", prompt=PROMPT, length=20)
    assert made["spans"] == [[-1, 0, 20]]
    check(models[True, 0], made)

    # Each worker is a member of the group: the trainer is rank 0, they are 1 and 2.
    group = asdict(sender.open(world_size=3))
    order = {"prompt": PROMPT, "length": 60, "folder": str(models[True, 1]), "version": 5}
    owner.give(do="update", group=group | {"secret": group["secret"].hex()}, **order)
    assert sender.hear() == {"joined": True}
    sender.send(models[True, 1])
    assert sender.hear()["sent"] > 0
    made = owner.hear()
    (_, _, cut), new = made["spans"]
    assert 0 < cut < 60 and new == [5, cut, 60]
    check(models[True, 1], made, begin=cut)

    assert len(owner.processes) == 3  # The engine core and two workers.
    owner.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(owner.processes, timeout=PATIENCE)
    assert not alive
