"""A tiny model of each family, as the trainer's transformers saves it.

Heads have 32 dimensions, which vLLM's CPU kernels support, and there are several of each part, so that every kind of
sharding applies. Biases and norms are random too: with their initial values, errors in them would not be visible.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 128
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OLDER: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 256,
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
WINDOW = {"sliding_window": 16}
MAMBA = {
    "mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_d_state": 16,
    "mamba_d_conv": 4, "mamba_chunk_size": 16,
}  # fmt: skip
MLA = {
    "q_lora_rank": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "head_dim": 64, "num_key_value_heads": 4,
}  # fmt: skip

DENSE: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "mistral": {**COMMON, **WINDOW},
    "ministral3": COMMON,
    "qwen2": COMMON,
    "qwen3": COMMON,
    "gemma": COMMON,
    "gemma2": {**COMMON, **WINDOW, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0,
               "final_logit_softcapping": 10.0},
    "gemma3_text": {**COMMON, **WINDOW, "query_pre_attn_scalar": 32},
    "phi": OLDER,
    "phi3": COMMON,
    "glm": COMMON,
    "glm4": COMMON,
    "granite": {**COMMON, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
                "embedding_multiplier": 6.0},
    "olmo": COMMON,
    "olmo2": COMMON,
    "olmo3": {**COMMON, **WINDOW},
    "smollm3": COMMON,
    "cohere": {**COMMON, "logit_scale": 0.25},
    "cohere2": {**COMMON, **WINDOW, "logit_scale": 0.25},
    "exaone4": {**COMMON, **WINDOW},
    "ernie4_5": COMMON,
    "hunyuan_v1_dense": COMMON,
    "seed_oss": COMMON,
    "stablelm": {**COMMON, "use_qkv_bias": True},
    "starcoder2": COMMON,
    "nemotron": COMMON,
    "arcee": COMMON,
    "apertus": COMMON,
    "helium": COMMON,
    "opt": {**OLDER, "ffn_dim": 128, "word_embed_proj_dim": 128},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gptj": {**GPT2, "rotary_dim": 16},
    "gpt_neox": {**OLDER, "intermediate_size": 128},
    "falcon": {**OLDER, "new_decoder_architecture": True, "num_kv_heads": 2},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 128, "n_layer": 2, "n_head": 4},
    "persimmon": {**OLDER, "intermediate_size": 128},
    "falcon_h1": {**COMMON, **MAMBA},
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16},
    "mamba2": {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "state_size": 16, "num_heads": 8,
               "head_dim": 32, "n_groups": 1, "chunk_size": 16},
    "lfm2": {**COMMON, "layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_dim": 128},
    "olmo_hybrid": COMMON,
    "qwen3_5_text": COMMON,
}  # fmt: skip
EXPERT: dict[str, dict[str, Any]] = {
    "mixtral": {**COMMON, **LOCAL_EXPERTS, "sliding_window": None},
    "qwen2_moe": {**COMMON, **EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**COMMON, **EXPERTS},
    "glm4_moe": {**COMMON, **ROUTED_EXPERTS},
    "granitemoe": {**COMMON, **LOCAL_EXPERTS},
    "granitemoeshared": {**COMMON, **LOCAL_EXPERTS, "shared_intermediate_size": 64},
    "granitemoehybrid": {**COMMON, **LOCAL_EXPERTS, "shared_intermediate_size": 64,
                         "layer_types": ["attention", "attention"]},
    "olmoe": {**COMMON, **EXPERTS},
    "flex_olmo": {**COMMON, **EXPERTS, "intermediate_size": 64},
    "ernie4_5_moe": {**COMMON, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 64,
                     "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    "gpt_oss": {**COMMON, **LOCAL_EXPERTS, **WINDOW},
    "llama4_text": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 128,
                    "attention_chunk_size": 128},
    "hunyuan_v1_moe": {**COMMON, "num_experts": 4, "moe_topk": 2},
    "dots1": {**COMMON, **ROUTED_EXPERTS},
    "exaone_moe": {**COMMON, **EXPERTS, **WINDOW, "num_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "afmoe": {**COMMON, **EXPERTS, **WINDOW, "num_shared_experts": 1, "num_dense_layers": 1,
              "score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "phimoe": {**COMMON, **LOCAL_EXPERTS},
    "lfm2_moe": {**COMMON, **EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "minimax_m2": {**COMMON, **LOCAL_EXPERTS, "rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "jamba": {**COMMON, **LOCAL_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "deepseek_v2": {**COMMON, **ROUTED_EXPERTS, **MLA},
    "deepseek_v3": {**COMMON, **ROUTED_EXPERTS, **MLA, "topk_method": "noaux_tc"},
    "qwen3_next": {**COMMON, **EXPERTS, "shared_expert_intermediate_size": 64},
    "dbrx": {"vocab_size": VOCABULARY, "d_model": 128, "n_heads": 4, "n_layers": 2, "max_seq_len": 256,
             "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
}  # fmt: skip
FAMILIES = {**DENSE, **EXPERT}
"""Values of config.json, by `model_type`."""
SHORT: dict[str, Any] = {**COMMON, "max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0 + n / 8 for n in range(16)], "long_factor": [9.0] * 16}
TO_THE_END: dict[str, tuple[int, dict[str, Any]]] = {
    "phi3, longrope": (32, {**SHORT, "rope_scaling": {"type": "longrope", **FACTORS},
                            "original_max_position_embeddings": 32}),
    "llama, dynamic": (64, {**SHORT, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "qwen2, yarn": (64, {**SHORT, "rope_scaling": {"type": "yarn", "factor": 4.0,
                                                   "original_max_position_embeddings": 64}}),
    "gemma2, capped": (64, {**SHORT, **WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "cohere, scaled": (64, {**SHORT, "logit_scale": 0.25}),
    "granite, scaled": (64, {**SHORT, "logits_scaling": 4.0, "residual_multiplier": 0.5,
                             "attention_multiplier": 0.1}),
}  # fmt: skip
"""Families whose computation may differ toward the end of the context, and the context for the transformers engine:
with longrope up to where its frequencies change."""
WHY = {
    "cohere2": "vLLM's sliding windows are one token longer than transformers': longer texts than the window differ",
    "apertus": "vLLM rounds the parameters of the activation, xIELU, to bf16",
    "bloom": "vLLM computes its GELU exactly, transformers by a tanh",
    "ernie4_5_moe": "vLLM's router for CPUs leaves out the bias by which experts are chosen",
    "mamba": "its build for CPUs has no selective scan",
    "jamba": "its build for CPUs has no selective scan",
    "olmo_hybrid": "its gated delta nets need Triton, which has no CPUs",
    "qwen3_next": "it computes gated delta nets in bf16 only on a CPU",
    "dbrx": "it lacks the names that transformers 5 gives the experts",
}
"""Reasons for missing results of vLLM that are more specific than its errors."""


def save(family: str, folder: Path) -> None:
    """Write the family's model, deterministically, and a tokenizer, which is not used for text."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    values = FAMILIES[family] if family in FAMILIES else TO_THE_END[family][1]
    config = CONFIG_MAPPING[family.partition(",")[0]](**values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.ndim:
                continue  # a constant
            if tensor.ndim == 1 or name.endswith("_bias"):  # including biases of the routers
                tensor.add_(torch.randn_like(tensor) * 0.1)
            else:
                tensor.copy_(torch.randn_like(tensor) * tensor.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={chr(33 + n): n for n in range(VOCABULARY - 40)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
