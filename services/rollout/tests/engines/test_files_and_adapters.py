"""Contract of every engine: weights from files, and adapters that are added to the model folder's own weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import BUCKET_BYTES, PATIENCE, PROMPT, Harness
from models import read_weights
from packing import pack, write
from quartet.v1 import rollout_pb2

from quartet_common.model_folder import folder_checksum
from quartet_common.weights import bucket_file
from quartet_rollout.engines import EngineError, ManifestError, SamplingSettings, WeightGroupInfo, WeightTransferError
from quartet_rollout.engines.weight_group import ModelSpec

pytestmark = pytest.mark.timeout(2 * PATIENCE)
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=20)
TOLERANCE = 1e-4
TARGETS = ("q_proj", "v_proj", "down_proj")
RANK, ALPHA = 4, 12.0
NO_MEETING = WeightGroupInfo("file", "", 0, 1, 2, 30.0, b"", 1)


async def update(harness: Harness, manifest: rollout_pb2.WeightManifest, folder: Path, version: int) -> int:
    """A whole update from files; return the checksum of what came."""
    harness.left_group()
    harness._installed = None
    await harness.engine.join_weight_group(NO_MEETING)
    await harness.engine.pause("keep")
    try:
        came = await harness.engine.receive_weights(manifest, 60.0, str(folder))
        await harness.engine.install_weights(version)
    finally:
        await harness.engine.resume()
    return came[-1]


def test_weights_from_files_are_installed_as_any_others(harness: Harness, tmp_path: Path) -> None:
    manifest, sent = write(read_weights(harness.folders[1]), tmp_path, BUCKET_BYTES)
    assert len(manifest.bucket_bytes) > 2
    assert harness.run(update(harness, manifest, tmp_path, 3)) == sent
    (completion,) = harness.run(harness.collect(PROMPT, 1, GREEDY))
    assert completion.version_spans == ((3, 0, len(completion.token_ids)),)
    expected = harness.log_probs(harness.folders[1], PROMPT, completion.token_ids)
    np.testing.assert_allclose(completion.log_probs, expected, atol=TOLERANCE)


def test_files_that_are_not_there_or_broken_leave_the_old_weights(harness: Harness, tmp_path: Path) -> None:
    manifest, _ = write(read_weights(harness.folders[1]), tmp_path, BUCKET_BYTES)
    (tmp_path / bucket_file(manifest, 1)).write_bytes(b"no safetensors")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(WeightTransferError, match="cannot be read"):
            harness.run(update(harness, manifest, folder, 1))
    assert harness.engine.policy_version == 0
    (after,) = harness.generate(temperature=0.0, max_new_tokens=20)
    np.testing.assert_array_equal(after.token_ids, harness.fresh[0].token_ids[:20])


# ------------------------------------------------------------------ adapters


def config(base: Path) -> rollout_pb2.LoraConfig:
    return rollout_pb2.LoraConfig(r=RANK, alpha=ALPHA, target_modules=TARGETS, base_checksum=folder_checksum(base))


def adapter(base: Path, seed: int, size: float = 0.1) -> dict[str, torch.Tensor]:
    """Random A and B for every matrix that TARGETS names, under PEFT's names."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, weight in read_weights(base).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS and weight.dim() == 2:
            out, into = weight.shape
            made[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, into, generator=generator) * size
            made[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) * size
    return made


def unmerged(harness: Harness, weights: dict[str, torch.Tensor], output: np.ndarray) -> np.ndarray:
    """Log-probs by plain transformers with the adapter beside its layer: y = W0 x + B (A x) alpha / r."""
    hooks = []
    for name, module in harness.reference(harness.folders[0]).named_modules():
        a = weights.get(f"base_model.model.{name}.lora_A.weight")
        b = weights.get(f"base_model.model.{name}.lora_B.weight")
        if a is not None:
            added = lambda _, inputs, result, a=a, b=b: result + inputs[0] @ a.T @ b.T * ALPHA / RANK  # noqa: E731
            hooks.append(module.register_forward_hook(added))
    try:
        return harness.log_probs(harness.folders[0], PROMPT, output)
    finally:
        for hook in hooks:
            hook.remove()


def install(harness: Harness, weights: dict[str, torch.Tensor], folder: Path, version: int):
    """Install an adapter from files; return a greedy completion."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    manifest, sent = write(weights, folder, BUCKET_BYTES, config(harness.folders[0]))
    assert harness.run(update(harness, manifest, folder, version)) == sent
    (completion,) = harness.run(harness.collect(PROMPT, 1, GREEDY))
    assert completion.version_spans[0][0] == version
    return completion


def test_adapters_are_added_to_the_base_once_however_often_they_come(harness: Harness, tmp_path: Path) -> None:
    first, second = (adapter(harness.folders[0], seed) for seed in (1, 2))
    for version, weights in enumerate((first, first, second), start=1):
        completion = install(harness, weights, tmp_path / "adapter", version)
        expected = unmerged(harness, weights, completion.token_ids)
        np.testing.assert_allclose(completion.log_probs, expected, atol=TOLERANCE)
        assert np.abs(expected - harness.log_probs(harness.folders[0], PROMPT, completion.token_ids)).max() > 0.01
    nothing = {name: tensor * 0 for name, tensor in first.items()}
    completion = install(harness, nothing, tmp_path / "adapter", 9)
    base = harness.fresh[0]
    np.testing.assert_array_equal(completion.token_ids, base.token_ids[:20])
    np.testing.assert_allclose(completion.log_probs, base.log_probs[:20], atol=1e-6)


@pytest.mark.parametrize(
    ("adapted", "spoil", "words"),
    [
        (False, lambda m: setattr(m, "kind", 0), "manifest.kind: got WEIGHT_KIND_UNSPECIFIED; allowed: "),
        (False, lambda m: setattr(m, "kind", 99), "manifest.kind: got 99; allowed: WEIGHT_KIND_FULL"),
        (False, lambda m: m.tensors.pop(), "is missing"),
        (False, lambda m: setattr(m.tensors[2], "name", "layers.7.w"), "'layers.7.w' is not a parameter"),
        (False, lambda m: m.tensors[0].shape.append(1), r"has shape \[.*, 1\]; allowed: \["),
        (False, lambda m: m.tensors.append(m.tensors[0]), "comes twice"),
        (False, lambda m: setattr(m.tensors[0], "offset", m.bucket_bytes[0]), "weight'"),
        (True, lambda m: m.lora.ClearField("alpha"), "manifest.lora.alpha: got 0"),
        (True, lambda m: m.lora.target_modules.append("lm_head"), "'lm_head' is no inner linear layer"),
        (True, lambda m: m.lora.target_modules.append("o_proj"), "o_proj.lora_A.weight' and 3 more are missing"),
        (True, lambda m: setattr(m.lora, "r", RANK + 1), r"has shape \[4, (\d+)\]; allowed: \[5, \1\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(models: dict, adapted: bool, spoil: Any, words: str) -> None:
    folder = models[False, 0]
    weights, lora = (adapter(folder, 1), config(folder)) if adapted else (read_weights(folder), None)
    manifest, _ = pack(weights, BUCKET_BYTES, lora)
    spec = ModelSpec.of_folder(str(folder))
    spec.check(manifest)
    spoil(manifest)
    with pytest.raises(ManifestError, match=words):
        spec.check(manifest)


def test_an_adapter_of_another_base_model_is_refused(harness: Harness, tmp_path: Path) -> None:
    lora = config(harness.folders[0])
    lora.base_checksum ^= 1
    manifest, _ = write(adapter(harness.folders[0], 1), tmp_path, BUCKET_BYTES, lora)
    with pytest.raises(EngineError, match="the adapter is for a base model of checksum"):
        harness.run(update(harness, manifest, tmp_path, 1))
    assert harness.engine.policy_version == 0
