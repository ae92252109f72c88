"""Log-probs of a family's tokens: those of transformers' own forward pass, the same each time, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_helpers import BIASED, LLAMA_SIZES, SIZES, bias_routers, gradients, make_group, make_learner, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from quartet_common.tensors import decode, decode_ragged
from quartet_trainer.batch import ExperienceError
from quartet_trainer.learner import LearnerError
from quartet_trainer.learner.checks import ModelFolderError, check_completion_length, check_model_folder
from quartet_trainer.learner.model import Policy, load_causal_lm

TOKENS = torch.randint(3, 64, (1, 24), generator=torch.Generator().manual_seed(0))
LLAMA = {**LLAMA_SIZES, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GEMMA2 = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "sliding_window": 8, **LLAMA, "head_dim": 8}
DROPOUT = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2": GEMMA2,
    "Cohere": {**LLAMA, "logit_scale": 0.0625},
    "GPTNeoX": {**SIZES, **DROPOUT},
    "OPT": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.5, "layerdrop": 0.5},
    "Mpt": {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "attn_config": {"attn_pdrop": 1}},
    "Qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "Mixtral": {**LLAMA, "router_jitter_noise": 0.5, "num_local_experts": 4, "sliding_window": 8},
}  # fmt: skip


def trained(model: PreTrainedModel) -> torch.Tensor:
    """What training computes for `TOKENS`."""
    places = torch.arange(TOKENS.numel() - 1)
    with torch.no_grad():
        policy = Policy(model.train())
        return policy(TOKENS, torch.zeros_like(places), places, None, TOKENS[0, 1:], torch.ones(len(places)))[0]


def plain(model: PreTrainedModel) -> torch.Tensor:
    """What transformers computes for them."""
    with torch.no_grad():
        logits = model.eval()(input_ids=TOKENS, use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1).gather(-1, TOKENS[0, 1:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_familys_own_forward_pass(family: str, tmp_path: Path) -> None:
    path = save_model(tmp_path, family, **FAMILIES[family])
    expected = plain(AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"))
    model = load_causal_lm(path, torch.float32, share_prompts=True)
    torch.testing.assert_close(trained(model), expected, rtol=0, atol=2e-5)
    assert torch.equal(trained(model), trained(model))


def test_what_a_family_does_not_train_stays(tmp_path: Path) -> None:
    """The bias by which ERNIE 4.5 chooses experts: `from_pretrained` makes it trainable, and it gets no gradient."""
    path = save_model(tmp_path, "Ernie4_5_Moe", **LLAMA, moe_num_experts=4, moe_k=2, moe_intermediate_size=32,
                moe_layer_start_index=1)  # fmt: skip
    learner = make_learner(path, precision="fp32")
    for _ in range(2):  # DDP waits for every gradient that it was told of
        learner.train_step([make_group(np.random.default_rng(0), [4, 9])])
    parameters = load_causal_lm(path, torch.float32).named_parameters()
    kept = [name for name, parameter in parameters if not parameter.requires_grad]
    assert kept == ["model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"]


@pytest.mark.parametrize(
    ("family", "size", "values"),
    [("RecurrentGemma", 0.01, {**LLAMA, "lru_width": 32}), ("Falcon", 0.4, {**SIZES, "alibi": True})],
)
def test_families_that_training_would_compute_wrongly(
    family: str, size: float, values: dict[str, Any], tmp_path: Path
) -> None:
    """A cap by another key, which logits as small as these hide; and ALiBi, which fused attention scales otherwise."""
    with pytest.raises(LearnerError, match=f"{family}ForCausalLM has other log-probs in training"):
        load_causal_lm(save_model(tmp_path, family, size, **values), torch.float32)


@pytest.mark.parametrize(
    "values",
    [{"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [9.0] * 4},
      "original_max_position_embeddings": 16},
     {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16}],
    ids=["longrope", "dynamic"],
)  # fmt: skip
def test_no_sequence_is_so_long_that_its_frequencies_are_those_of_the_micro_batch(
    values: dict[str, Any], tmp_path: Path
) -> None:
    path = save_model(tmp_path, "Llama", **{**LLAMA, **values})
    cuts = [make_learner(path, micro_batch_tokens=tokens) for tokens in (16, 1000)]
    rng = np.random.default_rng(0)
    fits = [make_group(rng, [4, 9, 11]), make_group(rng, [2, 3, 5])]
    for found, expected in zip(*(gradients(cut, fits).values() for cut in cuts), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    with pytest.raises(ExperienceError, match="group 1: a completion has 17 tokens with its prompt; allowed: at most"):
        cuts[0].train_step([fits[0], make_group(rng, [4, 12])])
    check_completion_length(check_model_folder(path), 15)
    with pytest.raises(ModelFolderError, match=r"run\.sampling\.max_new_tokens is 16; allowed: with the prompt at"):
        check_completion_length(check_model_folder(path), 16)


EXPERTS: dict[str, dict[str, Any]] = {
    "Mixtral": FAMILIES["Mixtral"],
    "MiniMaxM2": {**LLAMA, **BIASED["MiniMaxM2"]},
    "Glm4Moe": {**LLAMA, **BIASED["Glm4Moe"], "first_k_dense_replace": 0},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_where_the_tokens_of_a_mixture_of_experts_go(family: str, tmp_path: Path) -> None:
    """Cut into many passes, the same as what transformers' own forward pass over each completion hands its experts."""
    path = save_model(tmp_path, family, **EXPERTS[family])
    if family != "Mixtral":
        bias_routers(path)
    rng = np.random.default_rng(0)
    groups = [make_group(rng, [4, 9, 11], prompt=n) for n in (3, 6)]
    expected, entropies = torch.zeros(2, 4), []
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    used: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(
                lambda _, given: used.append(next(each for each in given if each.dtype == torch.int64))
            )
    for group in groups:
        prompt = decode(group.prompt_token_ids)
        for completion in decode_ragged(group.completion_token_ids):
            tokens = torch.tensor(np.concatenate([prompt, completion]).astype(np.int64))[None]
            used.clear()
            with torch.no_grad():
                layers = model.model(input_ids=tokens, output_router_logits=True).router_logits
            for counts, experts, logits in zip(expected, used, layers, strict=True):
                chances = logits[len(prompt) - 1 : -1].softmax(-1)
                entropies.append(-(chances * chances.log()).sum(-1))
                counts += torch.nn.functional.one_hot(experts[len(prompt) - 1 : -1], 4).sum((0, 1))
    if family != "Mixtral":
        assert (expected == 0).any()
    for cut in (20, 1000):
        learner = make_learner(path, precision="fp32", micro_batch_tokens=cut, skip_zero_advantage=False)
        found = learner.train_step(groups)
        shares = expected / expected.sum(-1, keepdim=True)
        assert found["router_load_max"] == pytest.approx(float(4 * shares.amax(-1).mean()))
        assert found["router_idle_experts"] == float((expected == 0).double().mean())
        assert found["router_entropy"] == pytest.approx(float(torch.cat(entropies).mean() / np.log(4)), rel=1e-5)


def test_yarn_scales_by_its_factor_whatever_the_longest_position(tmp_path: Path) -> None:
    """As vLLM does."""
    yarn = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
    found = []
    for longest in (16, 64):
        path = save_model(tmp_path / str(longest), "Qwen2", **{**LLAMA, **yarn, "max_position_embeddings": longest})
        found.append(trained(load_causal_lm(path, torch.float32)))
    assert torch.equal(*found)
