"""What the trainer's tests share: a tiny model folder, made-up groups, and a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from quartet.v1 import experience_pb2, tensor_pb2
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from quartet_common.config import RunSection
from quartet_common.tensors import encode, encode_ragged
from quartet_trainer.algorithms import ALGORITHMS, Algorithm
from quartet_trainer.batch import decode_groups
from quartet_trainer.learner import LearnerSettings, create_learner

VOCABULARY = 64


def _rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def _norm_in_fp64(norm: type[torch.nn.Module]) -> None:
    """transformers rounds to float32 in its norms, also in a float64 model: then two right ways to add the same numbers
    differ by 1e-8 and more. A float64 model of the tests is one throughout."""
    rounding = norm.forward

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        return (_rms_norm if hidden.dtype == torch.float64 else rounding)(self, hidden)

    norm.forward = forward


for _norm in (Glm4MoeRMSNorm, GraniteRMSNorm, LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm):
    _norm_in_fp64(_norm)


Run = partial(RunSection, max_steps=100, sampling={"max_new_tokens": 16})

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA_SIZES = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
"""Of Llama and what came after it."""
QWEN2 = {**LLAMA_SIZES, "max_position_embeddings": 128, "rope_theta": 1e6, "tie_word_embeddings": True}


def save_model(
    folder: Path, family: str, size: float = 0.4, *, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """A random model whose weights have the standard deviation `size`: large ones make every operation visible."""
    torch.manual_seed(seed)
    made = getattr(transformers, f"{family}Config")(**config)
    made.initializer_range = made.init_std = size
    AutoModelForCausalLM.from_config(made).to(dtype).save_pretrained(folder)
    return folder


_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
_GROUPS = {**_EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
BIASED: dict[str, dict[str, Any]] = {
    "Glm4Moe": _GROUPS,
    "SolarOpen": _GROUPS,
    "ExaoneMoe": {**_EXPERTS, "num_experts": 4, "sliding_window": 8},
    "MiniMaxM2": {**_EXPERTS, "num_local_experts": 4},
    "Lfm2Moe": {**_EXPERTS, "num_experts": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "DeepseekV3": {**_GROUPS, "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
                   "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 8},
    "Dots1": {**_GROUPS, "n_shared_experts": 1, "layer_types": ["full_attention"] * 2},
}  # fmt: skip
"""Beside `LLAMA_SIZES`: of families whose routers add a persistent buffer to their scores."""


BIASES = ("e_score_correction_bias", "expert_bias")


def bias_routers(path: Path, shift: float = 0.0) -> dict[str, torch.Tensor]:
    """Have the routers of a folder always choose one expert and never another, which their scores do not show.

    Returns the biases by their names in files. They are float32, and no numbers of bf16.
    """
    state = load_file(path / "model.safetensors")
    names = [name for name in state if name.endswith(BIASES)]
    biases = {name: torch.tensor([9.001, 0.003, 0.0, -9.001]) + number + shift for number, name in enumerate(names)}
    assert biases
    save_file(state | biases, path / "model.safetensors", metadata={"format": "pt"})
    return biases


def make_model(folder: Path, *, initializer_range: float = 0.2, **config: Any) -> Path:
    """A random two-layer Qwen2 with tied embeddings, and a file that stands for its tokenizer."""
    save_model(folder, "Qwen2", initializer_range, **{**QWEN2, **config})
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}\n', encoding="utf-8")
    return folder


def make_group(
    rng: np.random.Generator,
    lengths: Sequence[int],
    *,
    prompt: int = 5,
    rewards: Sequence[float] | None = None,
    mask: bool = False,
    truncated: Sequence[int] | None = None,
    temperature: float | None = None,
    version: int = 0,
) -> experience_pb2.GroupTensors:
    """One group with completions of these lengths; what is not given is drawn."""
    n = len(lengths)
    tokens = [rng.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]
    log_probs = [rng.normal(-4.0, 0.5, length).astype(np.float32) for length in lengths]
    rewards = rng.normal(0, 1, n) if rewards is None else np.asarray(rewards)
    temperatures = rng.uniform(0.7, 1.3, n) if temperature is None else np.full(n, temperature)
    group = experience_pb2.GroupTensors(
        prompt_token_ids=encode(rng.integers(0, VOCABULARY, prompt).astype(np.int32)),
        completion_token_ids=encode_ragged(tokens, tensor_pb2.DTYPE_INT32),
        rollout_log_probs=encode_ragged(log_probs, tensor_pb2.DTYPE_FLOAT32),
        rewards=encode(rewards.astype(np.float32)),
        temperatures=encode(temperatures.astype(np.float32)),
        truncated=encode(np.asarray([0] * n if truncated is None else truncated, dtype=np.uint8)),
        version_spans=encode_ragged([np.array([version, 0, length]) for length in lengths], tensor_pb2.DTYPE_INT64),
        format_acc=encode(np.ones(n, dtype=np.float32)),
        ans_acc=encode((rewards > 0).astype(np.float32)),
    )
    if mask:
        rows = [rng.integers(0, 2, length).astype(np.uint8) for length in lengths]
        group.loss_mask.CopyFrom(encode_ragged(rows, tensor_pb2.DTYPE_UINT8))
    return group


def make_batch(seed: int = 0, groups: int = 4, size: int = 4, longest: int = 16) -> list[experience_pb2.GroupTensors]:
    """Groups of unequal prompts and lengths: some masks, some truncated, one of equal rewards."""
    rng = np.random.default_rng(seed)
    return [
        make_group(
            rng,
            [int(rng.integers(1, longest + 1)) for _ in range(size)],
            prompt=int(rng.integers(1, 9)),
            mask=index % 2 == 1,
            truncated=[int(i == 0) for i in range(size)],
            rewards=[1.0] * size if index == 1 else None,
        )
        for index in range(groups)
    ]


def settings(**values: Any) -> LearnerSettings:
    """fp64, so that comparisons show mistakes and not rounding. Keys of the algorithm are given beside the others."""
    own = {key for kind in ALGORITHMS.values() for key in kind.model_fields}
    algorithm = {key: values.pop(key) for key in own & values.keys()}
    chosen = values.pop("algorithm", "grpo")
    algorithm = chosen if isinstance(chosen, Algorithm) else algorithm | {"name": chosen}
    usual = {"precision": "fp64", "learning_rate": 1e-3, "max_grad_norm": 0.0}
    return LearnerSettings(**{**usual, "algorithm": algorithm, **values})


def make_learner(path: Path, run: RunSection | None = None, **values: Any) -> Any:
    """A learner of the model at `path`, as one process's, with these `settings`."""
    return create_learner(settings(**values), path, run or Run())


def all_parameters(plugin: Any) -> list[tuple[str, torch.nn.Parameter]]:
    """Those of the model, and of a value head."""
    head = plugin.value_head.named_parameters() if plugin.value_head is not None else ()
    return [*plugin.parameters(), *((f"value_head.{name}", parameter) for name, parameter in head)]


def gradients(learner: Any, groups: Sequence[experience_pb2.GroupTensors]) -> dict[str, torch.Tensor]:
    """The gradient of one batch by parameter name, without taking the step."""
    plan, updates, _ = learner._planner.updates(batch := decode_groups(groups, **learner._decode_arguments), 0)
    learner._accumulator.run(batch, plan, 0, updates[0].targets)
    found = {name: parameter.grad.clone() for name, parameter in all_parameters(learner._plugin)}
    learner._optimizer.zero_grad()
    return found


CUT_DEPENDENT = ("seconds", "micro_batches", "forward_tokens", "padding_ratio", "shared_prompt_tokens")


def comparable(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that do not depend on how a batch is cut."""
    return {name: value for name, value in metrics.items() if not any(part in name for part in CUT_DEPENDENT)}


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **near: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **near, msg=lambda m, n=name: f"{n}: {m}")
