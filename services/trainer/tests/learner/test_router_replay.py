"""Experts that the rollout chose, in the trainer's forward: against transformers with a router that is told them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_helpers import VOCABULARY, Run, make_group, make_learner, save_model
from quartet.v1 import experience_pb2, tensor_pb2
from test_families import LLAMA
from torch.nn import functional
from transformers import AutoConfig, Qwen3MoeForCausalLM

from quartet_common.tensors import decode, decode_ragged, encode, encode_ragged
from quartet_trainer.batch import ExperienceError, collate, decode_groups
from quartet_trainer.learner import LearnerError
from quartet_weights.routed_experts import Routing

EXPERTS, CHOSEN, LAYERS = 4, 2, 2
ROUTING = Routing((0, 1), LAYERS, EXPERTS, CHOSEN)
LENGTHS = [6, 1, 9]
CONFIG = {**LLAMA, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 16}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("experts"), "Qwen3Moe", **CONFIG)


def routed_group(seed: int = 0, **fields) -> tuple[experience_pb2.GroupTensors, list[np.ndarray]]:
    """A group that was routed at random, and of each sequence but its last token the experts [tokens, layers, 2]."""
    rng = np.random.default_rng(seed)
    group = make_group(rng, LENGTHS, **fields)
    prompt = decode(group.prompt_token_ids).size

    def draw(tokens: int) -> np.ndarray:
        return rng.permuted(np.tile(np.arange(EXPERTS), (tokens, LAYERS, 1)), axis=-1)[..., :CHOSEN].astype(np.uint8)

    shared, own = draw(prompt), [draw(length - 1) for length in LENGTHS]
    group.prompt_routed_experts.CopyFrom(encode(shared))
    group.completion_routed_experts.CopyFrom(encode_ragged([one.ravel() for one in own], tensor_pb2.DTYPE_UINT8))
    return group, [np.concatenate([shared, one]) for one in own]


def plain(path: Path, group: experience_pb2.GroupTensors, experts: list[np.ndarray]):
    """Log-probs of all completions' tokens by transformers' model with gates of the given experts, the model, and the
    share of these experts, where a token was chosen, that are not the highest of the router's scores."""
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
    given, start, others = [torch.empty(0)], decode(group.prompt_token_ids).size - 1, []

    def route(gate, layer):
        def forward(hidden):
            logits = functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
            indices = given[0][:, layer]
            best = logits.topk(CHOSEN).indices
            others.append((indices[:, :, None] != best[:, None, :]).all(-1)[start:])
            gates = logits.softmax(-1).gather(-1, indices)
            return logits, gates / gates.sum(-1, keepdim=True) if gate.norm_topk_prob else gates, indices

        return forward

    for layer, one in enumerate(model.model.layers):
        one.mlp.gate.forward = route(one.mlp.gate, layer)
    prompt, found = decode(group.prompt_token_ids).tolist(), []
    rows = zip(decode_ragged(group.completion_token_ids), decode(group.temperatures), experts, strict=True)
    for tokens, temperature, chosen in rows:
        given[0] = torch.from_numpy(chosen).long()
        logits = model(torch.tensor([prompt + tokens.tolist()[:-1]])).logits[0, start:] / float(temperature)
        found.append(logits.log_softmax(-1).gather(-1, torch.from_numpy(tokens).long()[:, None])[:, 0])
    return torch.cat(found), model, float(torch.cat(others).double().mean())


@pytest.mark.parametrize("options", [{}, {"share_prompts": False}, {"gradient_checkpointing": True}])
def test_the_policy_computes_with_the_rollouts_experts(path: Path, options) -> None:
    group, experts = routed_group()
    learner = make_learner(path, Run(router_replay=True), skip_zero_advantage=False, **options)
    batch = decode_groups([group], VOCABULARY, routing=ROUTING)
    plan = learner._planner.updates(batch, 0)[0]
    (completions,) = plan.micro_batches
    micro = collate(batch, plan, np.sort(completions)).to(torch.device("cpu"), torch.float64)
    log_probs = learner._plugin.model(*micro.inputs)[0]
    expected, model, _ = plain(path, group, experts)
    # transformers' own router takes its softmax in float32.
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)
    own = learner._plugin.model(*replace(micro, routed_experts=None).inputs)[0]
    assert (log_probs - own).abs().max() > 0.1

    log_probs.sum().backward()
    expected.sum().backward()
    reference = dict(model.named_parameters())
    for name, parameter in learner._causal_lm.named_parameters():
        gradient = reference[name].grad
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
    assert learner._causal_lm.model.layers[0].mlp.gate.weight.grad.norm() > 0  # routers learn all the same


@pytest.mark.parametrize("plugin", ["low_level_zero", "torch_fsdp"])
def test_a_step_measures_how_often_the_router_would_have_chosen_otherwise(path: Path, plugin: str) -> None:
    group, experts = routed_group()
    log_probs, _, share = plain(path, group, experts)
    rows = [row.detach().numpy().astype(np.float32) for row in log_probs.split(LENGTHS)]
    group.rollout_log_probs.CopyFrom(encode_ragged(rows, tensor_pb2.DTYPE_FLOAT32))
    given = {"precision": "fp32", "plugin": plugin, "skip_zero_advantage": False, "micro_batch_tokens": 20}
    found = make_learner(path, Run(router_replay=True), **given).train_step([group])
    assert found["log_prob_diff_max"] < 1e-4
    assert found["router_disagreement"] == pytest.approx(share)
    found = make_learner(path, **given).train_step([group])
    assert found["log_prob_diff_max"] > 0.1 and "router_disagreement" not in found


def test_experts_that_are_asked_for_must_be_there_and_right() -> None:
    group, _ = routed_group(prompt=5)
    group.prompt_routed_experts.data = bytes([EXPERTS]) * 20
    with pytest.raises(ExperienceError, match="experts from 4 to 4; this model's are 0 to 3"):
        decode_groups([group], VOCABULARY, routing=ROUTING)
    group.ClearField("prompt_routed_experts")
    with pytest.raises(ExperienceError, match="group 0: prompt_routed_experts is missing"):
        decode_groups([group], VOCABULARY, routing=ROUTING)
    decode_groups([group], VOCABULARY)  # nobody asks for them


def test_router_replay_is_refused_where_it_cannot_be(path: Path, model_path: Path) -> None:
    with pytest.raises(LearnerError, match="run.router_replay is not possible with trainer.plugin 'hybrid_parallel'"):
        make_learner(path, Run(router_replay=True), plugin="hybrid_parallel", precision="fp32")
    with pytest.raises(LearnerError, match="run.router_replay is true; a 'qwen2' model has no experts"):
        make_learner(model_path, Run(router_replay=True))
    assert Routing.of(AutoConfig.from_pretrained(model_path), torch.nn.Module(), lambda: None) is None
