"""The trainer's half: a learner makes a step with an engine's completions, and writes its weights to files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
from quartet.v1 import experience_pb2, rollout_pb2, tensor_pb2
from safetensors.torch import save_file
from sides import answer_orders
from transformers import AutoModelForCausalLM

from quartet_common.tensors import encode, encode_ragged
from quartet_common.weights import bucket_file, plan_buckets
from quartet_trainer.learner import LearnerSettings, create_learner
from quartet_trainer.weight_sync.transports import Packer
from quartet_weights.buckets import view

BUCKET_BYTES = 1 << 20


class Sampling:
    max_new_tokens = 128


class Run:
    max_steps, sampling, sampling_masks = 10, Sampling, False

    def __init__(self, router_replay: bool) -> None:
        self.router_replay = router_replay
        self.teachers: dict[str, Any] = {}


SETTINGS = {"precision": "fp32", "learning_rate": 1e-2, "skip_zero_advantage": False}
"""Settings with which every token counts and a step changes log-probs visibly."""


def group(of: dict, version: int) -> experience_pb2.GroupTensors:
    """Return a group as put by a rollout; only tokens of `version` count."""
    completions = of["completions"]
    tokens = [np.array(each["tokens"], np.int32) for each in completions]
    masks = [np.zeros(len(row), np.uint8) for row in tokens]
    for mask, each in zip(masks, completions, strict=True):
        for span_version, start, end in each["spans"]:
            mask[start:end] = span_version == version
    count = len(completions)
    experts = {}
    if completions[0]["experts"] is not None:
        routed = [np.array(each["experts"], np.uint8) for each in completions]
        rows = [each[len(of["prompt"]) :].ravel() for each in routed]
        experts["prompt_routed_experts"] = encode(routed[0][: len(of["prompt"])])
        experts["completion_routed_experts"] = encode_ragged(rows, tensor_pb2.DTYPE_UINT8)
    return experience_pb2.GroupTensors(
        prompt_token_ids=encode(np.array(of["prompt"], np.int32)),
        completion_token_ids=encode_ragged(tokens, tensor_pb2.DTYPE_INT32),
        rollout_log_probs=encode_ragged(
            [np.array(each["log_probs"], np.float32) for each in completions], tensor_pb2.DTYPE_FLOAT32
        ),
        rewards=encode(np.arange(count, dtype=np.float32)),
        temperatures=encode(np.ones(count, np.float32)),
        truncated=encode(np.zeros(count, np.uint8)),
        version_spans=encode_ragged(
            [np.array(each["spans"], np.int64).reshape(-1) for each in completions], tensor_pb2.DTYPE_INT64
        ),
        format_acc=encode(np.ones(count, np.float32)),
        ans_acc=encode(np.ones(count, np.float32)),
        loss_mask=encode_ragged(masks, tensor_pb2.DTYPE_UINT8),
        **experts,
    )


class Side:
    """One learner at a time."""

    def __init__(self) -> None:
        self._learner: Any

    def answer(self, do: str, **order: Any) -> Any:
        return getattr(self, do)(**order)

    def save(self, family: str, folder: str) -> None:
        models.save(family, Path(folder))

    def load(self, folder: str, settings: dict[str, Any] | None = None, router_replay: bool = False) -> None:
        values = LearnerSettings(**{**SETTINGS, **(settings or {})})
        self._learner = create_learner(values, Path(folder), Run(router_replay))

    def step(self, groups: list[dict], version: int) -> dict[str, float]:
        """Train on groups, of which tokens of the version count. Returns the step's metrics."""
        return self._learner.train_step([group(each, version) for each in groups])

    def publish(self, folder: str) -> str:
        """Write the weights with the file transport; return their manifest."""
        manifest = plan_buckets(rollout_pb2.WEIGHT_KIND_FULL, self._learner.weight_specs(), BUCKET_BYTES)
        for index, bucket in enumerate(Packer(manifest).pack(self._learner.weights)):
            contents = {t.name: view(t, bucket) for t in manifest.tensors if t.bucket == index}
            save_file(contents, Path(folder) / bucket_file(manifest, index), metadata={"format": "pt"})
        return manifest.SerializeToString().hex()

    @torch.no_grad()
    def stayed(self, folder: str, groups: list[dict]) -> float:
        """Return the largest difference of these tokens' log-probs from those of the saved model."""
        model, worst = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), 0.0
        for of in groups:
            for each in of["completions"]:
                tokens = torch.tensor([of["prompt"] + each["tokens"]])
                logits = model(input_ids=tokens, use_cache=False).logits[0, len(of["prompt"]) - 1 : -1]
                chosen = logits.log_softmax(-1).gather(-1, torch.tensor(each["tokens"])[:, None])[:, 0]
                worst = max(worst, float((chosen - torch.tensor(each["log_probs"])).abs().max()))
        return worst


if __name__ == "__main__":
    answer_orders(Side().answer)
