"""Every algorithm on two ranks, cut small: loss, gradient and metrics of one process and one padded batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import Run, make_batch, settings
from ranks import run_ranks, watch_steps
from safetensors.torch import load_file
from test_invariance import assert_same_gradient, comparable

from quartet_trainer.algorithms import ALGORITHMS
from quartet_trainer.learner import create_learner

pytestmark = pytest.mark.timeout(600)  # the ranks start once, within the first test

RANKS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"plugin": "hybrid_parallel", "tp_size": 2},
    "pp2": {"plugin": "hybrid_parallel", "pp_size": 2},
    "tp2, split_gather": {"plugin": "hybrid_parallel", "tp_size": 2, "sequence_parallel": "split_gather"},
    "sp2": {"plugin": "hybrid_parallel", "sp_size": 2, "sequence_parallel": "all_to_all"},
    "fsdp": {"plugin": "torch_fsdp"},
    "zero 1": {"plugin": "low_level_zero"},
    "zero 2": {"plugin": "low_level_zero", "zero_stage": 2},
}
RECOMPUTE = {"old_log_probs": "recompute"}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coefficient": 0.2, "dual_clip": 1.5},
    "dr_grpo": {"entropy_coefficient": 0.05},
    "dapo": {},
    "rloo": {"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "reinforce_pp": {"kl_coefficient": 0.1, **RECOMPUTE},
    "reinforce_pp_baseline": {"kl_coefficient": 0.1},
    "gspo": {"clip_low": 0.8, "clip_high": 3.0, "old_log_probs": "rollout"},
    "cispo": {"clip_high": 0.5},
    "ppo": {"kl_coefficient": 0.1, "max_mean_ratio": 0, "critic": {"learning_rate": 1e-2}},
    "value head": {
        "algorithm": "ppo",
        "kl_coefficient": 0.1,
        "max_mean_ratio": 0,
        "critic": {"form": "head", "learning_rate": 1e-2, "value_coefficient": 0.5},
        "ptx": {"coefficient": 0.3, "sequences_per_step": 3},
    },
    "sequence mask": {"correction": "sequence-mask", "sequence_mask_mean": "geometric", **RECOMPUTE},
    "ptx": {"ptx": {"coefficient": 0.3, "sequences_per_step": 3}},
    "passes": {"algorithm": "ppo", "epochs": 2, "mini_batches": 2, "max_mean_ratio": 0, **RECOMPUTE},
    "lora": {"lora": {"r": 4, "target_modules": ["q_proj", "down_proj"]}, "kl_coefficient": 0.2},
}
"""By algorithm, or by what is tried with grpo. Each has terms that a cut could change: means over the batch, over
completions, KLs, values."""
ONE_BATCH = {"micro_batch_tokens": 100_000, "max_padding": 0.99}
CUT = {"micro_batch_tokens": 60}
SPREAD = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "ppo", "ptx", "passes")
JOBS = [
    *(("dp2", case) for case in CASES),
    *((layout, case) for layout in ("tp2", "pp2") for case in SPREAD),
    *(("zero 2", case) for case in ("ppo", "ptx", "lora", "value head")),
    *(("zero 1", case) for case in ("lora", "value head")),
    *(("fsdp", case) for case in ("reinforce_pp", "ptx", "passes")),
    *((layout, case) for layout in ("tp2, split_gather", "sp2") for case in ("ppo", "ptx")),
    ("pp2", "lora"),
]
"""A layout meets each way in which an algorithm uses the model: a KL in the loss and in the reward, entropy, log-probs
beforehand, whole sequences, a critic, texts, several updates. Adapters are refused with torch_fsdp and tp_size > 1,
value heads with torch_fsdp and hybrid_parallel. ZeRO treats all algorithms alike: its ways are its exchange of
gradients and what it does to the optimizer. It keeps the optimizer's weights in float32."""


def values_of(case: str, texts: Path) -> dict[str, Any]:
    values = {"algorithm": case if case in ALGORITHMS else "grpo", **CASES[case]}
    if "ptx" in values:
        values["ptx"] = {**values["ptx"], "data": str(texts)}
    return values


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    lines = ([1, 2, 3, 4, 5, 6], [9, 8], [7, 7, 7, 1], [5, 4, 3, 2, 1, 0, 9, 9])
    path.write_text("".join(json.dumps({"input_ids": line}) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def batches() -> list[list]:
    """Before the second the weights have moved: off the reference, and the value head off 0. With several updates a
    step, gradients are those of its last."""
    return [make_batch(seed=51, groups=5, size=3, longest=12), make_batch(seed=52, groups=2, size=3, longest=8)]


@pytest.fixture(scope="session")
def spread(model_path: Path, texts: Path, batches: list[list], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layouts and cases, in one start of the ranks."""
    out = tmp_path_factory.mktemp("spread")
    jobs = [
        {
            "name": f"{layout} {case}",
            "model": str(model_path),
            "settings": {**values_of(case, texts), **LAYOUTS[layout], **CUT},
            "steps_only": True,
        }
        for layout, case in JOBS
    ]
    run_ranks(out, RANKS, jobs, batches)
    return out


@pytest.fixture(scope="module")
def alone(model_path: Path, texts: Path, batches: list[list]) -> Any:
    """From a case to its gradients, metrics and critic in one process that takes each batch at once."""
    known: dict[str, Any] = {}

    def of(case: str) -> Any:
        if case not in known:
            known[case] = watch_steps(
                create_learner(settings(**values_of(case, texts), **ONE_BATCH), model_path, Run()), batches
            )
        return known[case]

    return of


def test_every_algorithm_is_here() -> None:
    assert set(ALGORITHMS) <= set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_micro_batches(model_path: Path, texts: Path, batches: list[list], alone: Any, case: str) -> None:
    expected, expected_metrics = alone(case)
    learner = create_learner(settings(**values_of(case, texts), **CUT), model_path, Run())
    found, (metrics,) = watch_steps(learner, batches[:1])
    assert_same_gradient(of_batch(found, 0), of_batch(expected, 0))
    updates = CASES[case].get("epochs", 1) * CASES[case].get("mini_batches", 1)
    assert expected_metrics[0]["micro_batches"] == updates < metrics["micro_batches"]
    assert comparable(metrics) == pytest.approx(comparable(expected_metrics[0]), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("layout", "case"), JOBS)
def test_two_ranks(spread: Path, alone: Any, layout: str, case: str) -> None:
    expected, expected_metrics = alone(case)
    exact = LAYOUTS[layout].get("plugin") != "low_level_zero"
    near = {"rel": 1e-5, "abs": 1e-8} if exact else {"rel": 1e-4, "abs": 1e-5}
    for rank in range(RANKS):
        folder = spread / f"{layout} {case}"
        found = load_file(folder / f"gradients-{rank}.safetensors")
        assert_same_gradient(of_batch(found, 0), of_batch(expected, 0))
        if exact:
            assert_same_gradient(of_batch(found, 1), of_batch(expected, 1))
        metrics = json.loads((folder / f"metrics-{rank}.json").read_text(encoding="utf-8"))
        assert metrics[0]["micro_batches"] > 1
        for ours, theirs in zip(metrics, expected_metrics, strict=True):
            assert comparable(ours) == pytest.approx(comparable(theirs), **near)
        if case in ("ppo", "passes", "value head") and exact:
            assert_same_gradient(of_batch(found, "critic"), of_batch(expected, "critic"))
        if case == "value head":
            assert {"0/value_head.weight", "critic/exp_avg/bias"} <= found.keys() == expected.keys()
            for name, tensor in of_batch(expected, "critic").items():
                torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, check_dtype=exact, msg=name)


def of_batch(found: dict[str, Any], index: int | str) -> dict[str, Any]:
    chosen = {name: tensor for name, tensor in found.items() if name.startswith(f"{index}/")}
    assert chosen
    return chosen
