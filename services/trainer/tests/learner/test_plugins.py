"""Every algorithm, under every plugin, on four ranks and cut small: what one process makes of whole batches."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from learner_helpers import (
    BIASED,
    BIASES,
    LLAMA_SIZES,
    assert_near,
    bias_routers,
    comparable,
    make_batch,
    make_learner,
    make_model,
    save_model,
)
from quartet.v1 import tensor_pb2
from ranks import run_ranks, take_steps
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from quartet_trainer.algorithms import ALGORITHMS
from quartet_trainer.algorithms.sft import Sft
from quartet_trainer.learner import LearnerError, LearnerSettings
from quartet_trainer.learner.checks import check_model
from quartet_trainer.learner.plugins.sharding_policy import check_modules

pytestmark = pytest.mark.timeout(600)  # the ranks start once, within the first test

RANKS = 4
COMMON = {"max_grad_norm": 0.5, "weight_decay": 0.5}
CUT = {"micro_batch_tokens": 60}
WHOLE = {"micro_batch_tokens": 100_000, "max_padding": 0.99}
HYBRID = {"plugin": "hybrid_parallel"}
ZERO = {"plugin": "low_level_zero"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"plugin": "torch_fsdp"},
    "zero 1": ZERO,
    "zero 2": {**ZERO, "zero_stage": 2},
    "zero 1, offload": {**ZERO, "offload_optimizer": True},
    "gemini": {"plugin": "gemini"},
    "gemini, offload": {"plugin": "gemini", "offload_optimizer": True},
    "tp2-dp2": {**HYBRID, "tp_size": 2},
    "tp2-dp2, zero 1": {**HYBRID, "tp_size": 2, "zero_stage": 1},
    "tp2-dp2, zero 2": {**HYBRID, "tp_size": 2, "zero_stage": 2},
    "pp2-dp2": {**HYBRID, "pp_size": 2},
    "pp2-dp2, zero 1": {**HYBRID, "pp_size": 2, "zero_stage": 1},
    "tp2-pp2": {**HYBRID, "tp_size": 2, "pp_size": 2},
    "sp2-dp2": {**HYBRID, "sp_size": 2},
    "sp2-dp2, zero 1": {**HYBRID, "sp_size": 2, "zero_stage": 1},
    "sp2-dp2, zero 2": {**HYBRID, "sp_size": 2, "zero_stage": 2},
    "sp2-pp2": {**HYBRID, "sp_size": 2, "pp_size": 2},
}
RECOMPUTE = {"old_log_probs": "recompute"}
TEXTS = {"ptx": {"coefficient": 0.3, "sequences_per_step": 3}}
LORA = {"r": 4, "target_modules": ["q_proj", "down_proj"]}
PPO = {"algorithm": "ppo", "kl_coefficient": 0.1, "max_mean_ratio": 0, "critic": {"learning_rate": 1e-2}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coefficient": 0.2, "dual_clip": 1.5},
    "dr_grpo": {"algorithm": "dr_grpo", "entropy_coefficient": 0.05},
    "dapo": {"algorithm": "dapo"},
    "rloo": {"algorithm": "rloo", "kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp": {"algorithm": "reinforce_pp", "kl_coefficient": 0.1, **RECOMPUTE},
    "reinforce_pp_baseline": {"algorithm": "reinforce_pp_baseline", "kl_coefficient": 0.1},
    "gspo": {"algorithm": "gspo", "clip_low": 0.8, "clip_high": 3.0, "old_log_probs": "rollout"},
    "cispo": {"algorithm": "cispo", "clip_high": 0.5},
    "ppo": PPO,
    "value head": {**PPO, "critic": {"form": "head", "learning_rate": 1e-2, "value_coefficient": 0.5}, **TEXTS},
    "sequence mask": {"correction": "sequence-mask", "sequence_mask_mean": "geometric", **RECOMPUTE},
    "ptx": TEXTS,
    "passes": {**PPO, "kl_coefficient": 0, "epochs": 2, "mini_batches": 2, **RECOMPUTE},
    "lora": {"lora": LORA, "kl_coefficient": 0.2},
    "checkpointing": {"entropy_coefficient": 0.05, "kl_coefficient": 0.2, "gradient_checkpointing": True},
    "sft": {"algorithm": Sft()},
    "standing still": {"learning_rate": 0.0},
}
"""Each has terms that a cut could change: means over the batch, over completions, KLs, values."""
CASES |= {name: {"algorithm": name} for name in ALGORITHMS if name not in CASES}


WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
SMALL = {**LLAMA_SIZES, "num_hidden_layers": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "granite": ("Granite", {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
}
"""What ColossalAI's sharding meets beside Qwen2: norms of heads, windows of some layers, factors beside the layers."""


@dataclass(frozen=True)
class Job:
    """What the ranks do once."""

    layout: str
    case: str
    model: str = "qwen2"
    resume: Job | None = None

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.case}, {self.model}" + (f", from {self.resume.layout}" if self.resume else "")

    @property
    def steps(self) -> int:
        """Where a batch without any advantage has no work, three."""
        return 3 if "dapo" in self.case else 2

    @property
    def exact(self) -> bool:
        """ZeRO keeps the optimizer's weights in float32, the others have float64."""
        return "zero" not in self.layout and (self.resume is None or self.resume.exact)


TP, LORA_PP, HEAD_ZERO = Job("tp2-dp2", "dapo"), Job("pp2-dp2", "lora"), Job("zero 2", "value head")
DDP_AFTER_TP = Job("ddp", "dapo", resume=TP)
FSDP_AFTER_DDP = Job("fsdp", "dapo", resume=DDP_AFTER_TP)
TP_ZERO = Job("tp2-dp2, zero 1", "dapo", resume=TP)
PP_ZERO = Job("pp2-dp2, zero 1", "dapo", resume=TP_ZERO)
ZERO_1 = Job("zero 1", "grpo", resume=PP_ZERO)
SPREAD = ("grpo", "reinforce_pp", "ppo", "ptx", "passes")
JOBS = [
    *(Job("ddp", case) for case in CASES if case not in ("checkpointing", "standing still")),
    *(Job(layout, case) for layout in ("tp2-dp2", "pp2-dp2") for case in SPREAD),
    *(Job("fsdp", case) for case in ("ptx", "passes")),
    *(Job("zero 2", case) for case in ("ppo", "lora")),
    *(Job(layout, "sft") for layout in ("tp2-dp2", "zero 2")),
    Job("zero 1, offload", "grpo"),
    *(Job("sp2-dp2", case) for case in ("ppo", "ptx")),
    *(Job(layout, "checkpointing") for layout in ("tp2-pp2", "sp2-dp2, zero 2")),
    Job("fsdp", "checkpointing", "llama"),
    Job("tp2-dp2, zero 1", "grpo", "llama"),
    Job("tp2-dp2, zero 2", "grpo", "mistral"),
    *(Job("tp2-pp2", "grpo", family) for family in ("qwen3", "granite")),
    *(Job(layout, "grpo", "glm4_moe") for layout in ("fsdp", "zero 2", "pp2-dp2")),
    Job("sp2-pp2", "dr_grpo", "llama"),
    *(TP, DDP_AFTER_TP, FSDP_AFTER_DDP, Job("tp2-pp2", "grpo", resume=FSDP_AFTER_DDP)),
    *(TP_ZERO, PP_ZERO, ZERO_1, Job("zero 2", "grpo", resume=ZERO_1)),
    *(HEAD_ZERO, Job("zero 1", "value head", resume=HEAD_ZERO)),
    *(LORA_PP, Job("sp2-dp2, zero 1", "lora", resume=LORA_PP)),
]
"""Every algorithm is cut over ranks by ddp; from the log-probs on, the other layouts do the same. They meet each way in
which one uses the model: a KL in the loss and in the reward, entropy, log-probs beforehand, a critic, texts, several
updates. Of dapo's batches one share or none has work: other replicas are idle. Adapters are refused with torch_fsdp and
tp_size > 1, value heads with torch_fsdp and hybrid_parallel. ZeRO treats all algorithms alike: its ways are how it
exchanges gradients and what it does to the optimizer."""
FSDP_BF16 = Job("fsdp", "grpo", "bf16")
GEMINI_STANDS = Job("gemini", "standing still", "bf16", FSDP_BF16)
NEAR = [
    *(Job(layout, "grpo", "bf16") for layout in ("pp2-dp2", "tp2-dp2, zero 1", "zero 2")),
    FSDP_BF16,
    Job("gemini, offload", "dapo", "bf16"),
    *(Job("gemini", case, "bf16") for case in ("checkpointing", "reinforce_pp", "sft")),
]
"""In bf16, of a model with small weights."""


@pytest.fixture(scope="session")
def models(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, (family, values) in FAMILIES.items():
        save_model(folder / name, family, 0.2, seed=5, **{**SMALL, "tie_word_embeddings": False, **values})
    save_model(folder / "glm4_moe", "Glm4Moe", 0.2, **SMALL, **BIASED["Glm4Moe"])
    bias_routers(folder / "glm4_moe")
    calm = make_model(folder / "calm", initializer_range=0.05)
    return {"qwen2": model_path, "bf16": calm, **{name: folder / name for name in (*FAMILIES, "glm4_moe")}}


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = ([1, 2, 3, 4, 5, 6], [9, 8], [7, 7, 7, 1], [5, 4, 3, 2, 1, 0, 9, 9])
    path.write_text("".join(json.dumps({"input_ids": line}) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def batches() -> list[list]:
    """Unequal lengths; of dapo, a batch with work for one share only; one with work for none. Before the second the
    weights have moved: off the reference, and the value head off 0."""
    one_needed = make_batch(seed=21, groups=1, size=3)
    one_needed[0].rewards.data = torch.tensor([1.0, 1.0, 4.0]).numpy().tobytes()
    one_needed[0].truncated.data = bytes([1, 1, 0])  # dapo leaves the truncated ones out
    none_needed = make_batch(seed=22, groups=1)
    none_needed[0].rewards.data = bytes(16)
    return [make_batch(seed=20, groups=5, size=3), one_needed, none_needed]


def values_of(job: Job, texts: Path) -> dict[str, Any]:
    values = {**COMMON, **CASES[job.case]}
    return {**values, "ptx": {**values["ptx"], "data": str(texts)}} if "ptx" in values else values


@pytest.fixture(scope="session")
def done(
    models: dict[str, Path], texts: Path, batches: list[list], tmp_path_factory: pytest.TempPathFactory
) -> dict[Job, Path]:
    """All jobs, in one start of the ranks; each one's folder."""
    out, jobs = tmp_path_factory.mktemp("ranks"), [*JOBS, *NEAR, GEMINI_STANDS]
    described = [
        {
            "name": job.name,
            "model": str(models[job.model]),
            "settings": values_of(job, texts)
            | {**LAYOUTS[job.layout], **CUT}
            | ({"precision": "bf16"} if job.model == "bf16" else {}),
            "resume": job.resume and job.resume.name,
            "steps": job.steps,
            "export": job.model != "qwen2" or job.case in ("checkpointing", "lora"),
        }
        for job in jobs
    ]
    run_ranks(out, RANKS, described, batches)
    return {job: out / job.name for job in jobs}


@pytest.fixture(scope="session")
def alone(models: dict[str, Path], texts: Path, batches: list[list], done: dict[Job, Path]) -> Any:
    """From a job to one process's learner after the same steps, and to what `take_steps` saw of them."""
    known: dict[Any, Any] = {}

    def of(job: Job) -> Any:
        key = job.case, job.model, job.resume
        if key not in known:
            learner = make_learner(models[job.model], **values_of(job, texts), **WHOLE)
            if job.resume:
                learner.load(done[job.resume] / "checkpoint")
            known[key] = learner, *take_steps(learner, batches[: job.steps])
        return known[key]

    return of


def seen_by(job: Job, done: dict[Job, Path], rank: int = 0) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What a rank left: the critic, weights, and the rest."""
    folder = done[job]
    tensors = (load_file(folder / f"{what}-{rank}.safetensors") for what in ("critic", "weights"))
    return *tensors, json.loads((folder / f"seen-{rank}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_plugin_steps_equal_one_process(done: dict[Job, Path], alone: Any, job: Job) -> None:
    """Gradients show in the optimizer's moments and in the norm among the metrics."""
    learner, expected, expected_metrics = alone(job)
    near = {"rel": 1e-5, "abs": 1e-8} if job.exact else {"rel": 1e-4, "abs": 1e-5}
    for rank in (0, RANKS - 1):
        critic, weights, seen = seen_by(job, done, rank)
        assert_near(critic, expected, rtol=1e-3, atol=1e-4, check_dtype=job.exact)
        for ours, theirs in zip(seen["metrics"], expected_metrics, strict=True):
            known = {name: value for name, value in theirs.items() if name in ours or "router" not in name}
            assert comparable(ours) == pytest.approx(comparable(known), **near)
        assert_near(weights, dict(learner.weights()), rtol=1e-5, atol=1e-7)
        assert seen["specs"] == {name: list(tensor.shape) for name, tensor in weights.items()}
        assert list(seen["specs"]) == [name for name, _ in learner.weights()]
    moments = saved_moments(done[job])
    tolerance = {"rtol": 1e-5, "atol": 1e-10} if job.exact else {"rtol": 1e-4, "atol": 1e-8}
    assert_near(moments, dict(learner._plugin.moments()), **tolerance, check_dtype=job.exact)


def saved_moments(folder: Path) -> dict[str, torch.Tensor]:
    """What the ranks wrote of them, each a file of its own."""
    files = sorted((folder / "checkpoint").glob("optimizer*.safetensors"))
    assert [file.name for file in files] == [
        f"optimizer-{n:05d}-of-{RANKS:05d}.safetensors" for n in range(1, RANKS + 1)
    ]
    return {key: tensor for file in files for key, tensor in load_file(file).items()}


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("job", NEAR, ids=lambda job: job.name)
def test_bf16_step_is_near_float32(models: dict[str, Path], done: dict[Job, Path], alone: Any, job: Job) -> None:
    learner, _, expected_metrics = alone(job)
    _, weights, seen = seen_by(job, done)
    before = flat(dict(make_learner(models["bf16"]).weights()))
    moved, expected_move = flat(weights) - before, flat(dict(learner.weights())) - before
    assert torch.nn.functional.cosine_similarity(moved, expected_move, dim=0) > 0.98
    for ours, theirs in zip(seen["metrics"], expected_metrics, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=0.02)
        assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=0.01)
    assert seen["metrics"][0]["grad_norm"] == pytest.approx(expected_metrics[0]["grad_norm"], rel=0.01)


def test_gemini_goes_on_from_another_plugins_checkpoint(models: dict[str, Path], done: dict[Job, Path]) -> None:
    """With a learning rate of 0 its weights, in float32, are what it has read; as they are on one rank."""
    _, left, _ = seen_by(FSDP_BF16, done)
    _, found, _ = seen_by(GEMINI_STANDS, done)
    assert_near(found, left, rtol=0, atol=0)
    moments = saved_moments(done[GEMINI_STANDS])
    assert int(moments["step/model.norm.weight"]) == 4
    one = make_learner(models["bf16"], **COMMON, plugin="gemini", precision="bf16")
    one.load(done[GEMINI_STANDS] / "checkpoint")
    assert_near(dict(one._plugin.weights()), left, rtol=0, atol=0)
    assert_near(dict(one._plugin.moments()), moments, rtol=0, atol=0)
    assert len(one._plugin.optimizer.chunk16_set) > 1


@pytest.mark.parametrize(
    "job", [job for job in (*JOBS, *NEAR) if job.model != "qwen2" or job.case == "checkpointing"], ids=lambda j: j.name
)
def test_exports_are_hugging_face_folders(done: dict[Job, Path], job: Job) -> None:
    AutoModelForCausalLM.from_pretrained(done[job] / "export")
    exported = load_file(done[job] / "export" / "model.safetensors")
    _, weights, _ = seen_by(job, done)
    assert_near(exported, weights, rtol=0, atol=0)


TP2, PP2, SP2 = LAYOUTS["tp2-dp2"], LAYOUTS["pp2-dp2"], LAYOUTS["sp2-dp2"]


@pytest.mark.parametrize(
    ("values", "family", "config", "message"),
    [
        (TP2, "GPTNeoX", {}, "a 'gpt_neox' model has no embed_tokens: use plugin 'torch_fsdp'"),
        (TP2, "Mixtral", {}, "not mlp.gate.weight of a 'mixtral' model; allowed with it: trainer.tp_size 1"),
        (TP2, "Qwen2", {"vocab_size": 63}, "trainer.tp_size 2 does not divide the model's vocab_size, 63"),
        ({**PP2, "pp_size": 4}, "Qwen2", {}, "trainer.pp_size 4 is more than the model's 3 layers"),
        (SP2, "Qwen2", WINDOW, "trainer.sp_size 2 is not possible with this model's attention, which has slid"),
    ],
    ids=str,
)
def test_models_that_cannot_be_spread_are_refused(
    values: dict[str, Any], family: str, config: dict[str, Any], message: str
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**{**SMALL, **config}))
    with pytest.raises(LearnerError, match=re.escape(message)):
        check_model(model.config, LearnerSettings(**values))
        check_modules(model, LearnerSettings(**values))


@pytest.mark.parametrize("plugin", ["low_level_zero", "torch_fsdp", "hybrid_parallel"])
def test_a_parameter_that_the_family_freezes_has_no_state(tmp_path: Path, plugin: str) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1}
    path = save_model(tmp_path / "model", "Afmoe", 0.2, **SMALL, head_dim=8, **experts)
    expected, learner = (make_learner(path, precision="fp32", plugin=name) for name in ("torch_ddp", plugin))
    assert learner._plugin.frozen == {"model.layers.1.mlp.expert_bias", "model.layers.2.mlp.expert_bias"}
    for one in (expected, learner):
        one.train_step(make_batch(seed=3))
    assert_near(dict(learner.weights()), dict(expected.weights()), rtol=1e-4, atol=1e-5)
    moments = dict(expected._plugin.moments())
    assert dict(learner._plugin.moments()).keys() == moments.keys()
    learner.snapshot(tmp_path / "checkpoint", {})()
    learner.load(tmp_path / "checkpoint")
    assert dict(learner._plugin.moments()).keys() == moments.keys()


@pytest.mark.parametrize(
    ("family", "plugin"),
    [(family, "torch_fsdp") for family in BIASED]
    + [("MiniMaxM2", "torch_ddp"), ("Lfm2Moe", "low_level_zero"), ("Dots1", "hybrid_parallel")],
)
def test_buffers_travel_like_parameters(tmp_path: Path, family: str, plugin: str) -> None:
    """Exactly, from and into folders in bf16; a checkpoint's are the model's after it is loaded."""
    path = save_model(tmp_path / "model", family, 0.2, dtype=torch.bfloat16, **{**LLAMA_SIZES, **BIASED[family]})
    biases = bias_routers(path)
    learner = make_learner(path, precision="bf16", plugin=plugin, kl_coefficient=0.1)
    learner.train_step(make_batch(seed=3))
    learner.export(tmp_path / "export")
    announced = [(name, getattr(torch, tensor_pb2.Dtype.Name(dtype)[6:].lower()), shape)
                 for name, dtype, shape in learner.weight_specs()]  # fmt: skip
    assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in learner.weights()] == announced
    exported, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "export", path))
    assert exported.keys() == original.keys() == dict(learner.weights()).keys()
    for found in (exported, dict(learner.weights())):
        assert_near({name: found[name] for name in biases}, biases, rtol=0, atol=0)
    learner.snapshot(tmp_path / "checkpoint", {})()
    moved = bias_routers(tmp_path / "checkpoint" / "model", shift=0.1)
    learner.load(tmp_path / "checkpoint")
    assert_near({name: tensor for name, tensor in learner.weights() if name in biases}, moved, rtol=0, atol=0)
    held = [tensor for name, tensor in learner._causal_lm.named_buffers() if name.endswith(BIASES)]
    assert all(torch.equal(*pair) for pair in zip(held, moved.values(), strict=True))


def test_a_buffer_of_integers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init = Qwen2Model.__init__

    def with_table(self: Any, config: Any) -> None:
        init(self, config)
        self.register_buffer("table", torch.arange(3))

    monkeypatch.setattr(Qwen2Model, "__init__", with_table)
    path = make_model(tmp_path)
    with pytest.raises(LearnerError, match=r"its buffer model\.table has elements of torch\.int64; allowed: floating"):
        make_learner(path)


def test_a_config_json_that_leaves_its_sizes_to_transformers_passes_preflight() -> None:
    check_model(SimpleNamespace(model_type="gpt2", n_layer=2), LearnerSettings(**TP2))
