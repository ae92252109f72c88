"""The weights as others get them: by name, and as a Hugging Face folder for transformers 4.51 and 5."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from learner_helpers import Run, make_batch, make_model, settings
from quartet.v1 import tensor_pb2
from transformers import AutoModelForCausalLM

from quartet_trainer.learner import create_learner

ROOT = Path(__file__).resolve().parents[4]
ROLLOUT_PYTHON = Path(os.environ.get("QUARTET_ROLLOUT_PYTHON", ROOT / ".quartet/envs/rollout/bin/python"))

LOG_PROBS = """
import json, sys
import torch, transformers
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.tensor(json.loads(sys.argv[2]))[None]
with torch.no_grad():
    log_probs = torch.log_softmax(model(input_ids=ids).logits[0].double(), dim=-1)
print(json.dumps({"version": transformers.__version__, "log_probs": log_probs.tolist()}))
"""


def trained(path: Path, **values):
    learner = create_learner(settings(precision="fp32", learning_rate=1e-2, **values), path, Run())
    learner.train_step(make_batch())
    return learner


def log_probs(path: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=torch.tensor(ids)[None]).logits[0].double(), dim=-1)


def test_weights_have_hugging_face_names_and_the_tied_head_is_left_out(model_path: Path) -> None:
    learner = trained(model_path)
    names = [name for name, _ in learner.weights()]
    model = AutoModelForCausalLM.from_pretrained(model_path)
    assert set(names) == {name for name, _ in model.named_parameters()}
    assert "lm_head.weight" not in names
    specs = [(name, tensor_pb2.DTYPE_FLOAT32, tuple(tensor.shape)) for name, tensor in learner.weights()]
    assert learner.weight_specs() == specs
    assert all(tensor.is_contiguous() and not tensor.requires_grad for _, tensor in learner.weights())


def test_an_untied_head_is_sent_and_the_dtype_is_the_folders(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", dtype=torch.bfloat16, tie_word_embeddings=False)
    learner = trained(path)
    assert ("lm_head.weight", tensor_pb2.DTYPE_BFLOAT16, (64, 32)) in learner.weight_specs()
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in learner.weights())
    learner.export(tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", torch_dtype="auto")
    assert exported.dtype == torch.bfloat16
    for name, tensor in learner.weights():
        assert torch.equal(exported.state_dict()[name], tensor), name


def test_an_export_is_the_trained_model_with_all_its_companions(model_path: Path, tmp_path: Path) -> None:
    learner = trained(model_path)
    learner.export(tmp_path / "export")
    ours, source = (
        json.loads((path / "config.json").read_text(encoding="utf-8")) for path in (tmp_path / "export", model_path)
    )
    assert ours == source
    assert (tmp_path / "export" / "tokenizer_config.json").read_bytes() == (
        model_path / "tokenizer_config.json"
    ).read_bytes()
    ids = list(range(40))
    with torch.no_grad():
        inside = torch.log_softmax(learner._causal_lm(input_ids=torch.tensor(ids)[None]).logits[0].double(), dim=-1)
    torch.testing.assert_close(log_probs(tmp_path / "export", ids), inside, rtol=0, atol=1e-5)
    assert (log_probs(model_path, ids) - inside).abs().max() > 1e-2


@pytest.mark.skipif(not ROLLOUT_PYTHON.exists(), reason=f"the rollout environment is not there ({ROLLOUT_PYTHON})")
def test_transformers_5_reads_an_export_alike(model_path: Path, tmp_path: Path) -> None:
    trained(model_path).export(tmp_path / "export")
    ids = [(7 * i) % 64 for i in range(100)]  # long enough for rope_theta 1e6 and 1e4 to differ
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(ROLLOUT_PYTHON), "-c", LOG_PROBS, str(tmp_path / "export"), json.dumps(ids)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    assert int(theirs["version"].split(".")[0]) >= 5
    expected = log_probs(tmp_path / "export", ids)
    torch.testing.assert_close(torch.tensor(theirs["log_probs"]).double(), expected, rtol=0, atol=2e-5)
