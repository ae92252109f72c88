"""The learner on ColossalAI's Booster with TorchDDPPlugin: every rank holds the whole model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from quartet.v1 import experience_pb2, tensor_pb2
from safetensors import SafetensorError

from quartet_common.log import get_logger
from quartet_trainer.algorithms import create_algorithm
from quartet_trainer.batches import ExperienceBatch, StepPlan, decode_groups, plan_step
from quartet_trainer.checkpoints import atomic_folder
from quartet_trainer.learner import distributed, storage
from quartet_trainer.learner.accumulation import Accumulator
from quartet_trainer.learner.base import RunLike
from quartet_trainer.learner.metrics import PEAKS, batch_metrics, computed_metrics
from quartet_trainer.learner.model_folder import check_model_folder
from quartet_trainer.learner.optimizer import LearningRate, create_optimizer
from quartet_trainer.learner.policy import Policy, load_causal_lm
from quartet_trainer.learner.settings import LearnerSettings
from quartet_trainer.losses.aggregation import token_weights

log = get_logger(__name__)

_WIRE_DTYPE = {
    torch.float32: tensor_pb2.DTYPE_FLOAT32,
    torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16,
    torch.float16: tensor_pb2.DTYPE_FLOAT16,
}
_WRITE_ERRORS = (OSError, TypeError, ValueError, RuntimeError, SafetensorError)


class TorchDDPLearner:
    """Implements `quartet_trainer.learner.Learner`."""

    def __init__(self, settings: LearnerSettings, model_path: Path, run: RunLike) -> None:
        """Load the model and boost it. See `quartet_trainer.learner.base.create_learner`."""
        config = check_model_folder(model_path)
        self.step = 0
        self._settings = settings
        self._model_path = model_path
        self._max_new_tokens = run.sampling.max_new_tokens
        self._algorithm = create_algorithm(settings)
        self._learning_rate = LearningRate(settings, run.max_steps)
        self._ranks = distributed.initialize(settings.seed)
        # The folder's own dtype is what the rollouts run in; training may need more digits.
        self._published_dtype = getattr(torch, config.get("torch_dtype") or "float32")

        dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        autocast = torch.bfloat16 if settings.precision == "bf16" else None
        causal_lm = load_causal_lm(model_path, dtype)
        causal_lm.train()
        if settings.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = Policy(causal_lm, autocast)
        self._booster = Booster(plugin=TorchDDPPlugin(gradient_as_bucket_view=True))
        optimizer = create_optimizer(policy, settings)
        self._model, self._optimizer, *_ = self._booster.boost(policy, optimizer)
        self._accumulator = Accumulator(
            settings=settings,
            algorithm=self._algorithm,
            booster=self._booster,
            model=self._model,
            optimizer=self._optimizer,
            reference=self._reference_policy(dtype, autocast),
            ranks=self._ranks,
        )

    def _reference_policy(self, dtype: torch.dtype, autocast: torch.dtype | None) -> Policy | None:
        """The weights of the model folder, frozen. Not boosted: DDP has nothing to do for a model without gradients."""
        if self._settings.kl_coefficient == 0:
            return None
        reference = Policy(load_causal_lm(self._model_path, dtype), autocast)
        return reference.to(self._ranks.device).eval().requires_grad_(False)

    def train_step(self, groups: Sequence[experience_pb2.GroupTensors]) -> dict[str, float]:
        """See `Learner.train_step`."""
        started = time.perf_counter()
        batch = decode_groups(groups, self._causal_lm.config.vocab_size)
        plan = self._plan(batch)
        sums, peaks = self._accumulator.run(batch, plan)

        optimizer_started = time.perf_counter()
        learning_rate = self._learning_rate(self.step)
        grad_norm = self._update(learning_rate)
        ended = time.perf_counter()
        peaks |= {"optimizer_seconds": ended - optimizer_started, "train_step_seconds": ended - started}
        peak_values = torch.tensor([peaks[name] for name in PEAKS], dtype=torch.float64, device=sums.device)
        distributed.sum_and_max(sums, peak_values)
        return {
            **batch_metrics(batch, plan),
            **computed_metrics(sums, peak_values, self._settings.kl_coefficient),
            "grad_norm": grad_norm,
            "update_skipped": float(not torch.isfinite(torch.tensor(grad_norm))),
            "learning_rate": learning_rate,
        }

    def _plan(self, batch: ExperienceBatch) -> StepPlan:
        settings, algorithm = self._settings, self._algorithm
        mask = batch.loss_mask
        if algorithm.mask_truncated:
            mask = mask & ~batch.per_token(batch.truncated)
        weights = token_weights(
            algorithm.aggregation, mask, batch.rows, completions=batch.completions, length=self._max_new_tokens
        )
        return plan_step(
            batch,
            mask=mask,
            weights=weights,
            advantages=algorithm.advantages(batch),
            skip_zero_advantage=settings.skip_zero_advantage and settings.kl_coefficient == 0,
            micro_batch_tokens=settings.micro_batch_tokens,
            max_padding=settings.max_padding,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
        )

    def _update(self, learning_rate: float) -> float:
        """One optimizer step; returns the gradient's norm. A gradient that is not finite leaves all as it was."""
        max_norm = self._settings.max_grad_norm or torch.inf
        grad_norm = self._optimizer.clip_grad_by_norm(max_norm, foreach=True).item()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if torch.isfinite(torch.tensor(grad_norm)):
            self._optimizer.step()
        else:
            log.warning("the gradient is not finite; the weights stay", extra={"step": self.step})
        self._optimizer.zero_grad()
        self.step += 1
        return grad_norm

    @property
    def _policy(self) -> Policy:
        return self._model.unwrap()

    @property
    def _causal_lm(self) -> torch.nn.Module:
        return self._policy.causal_lm

    def weight_specs(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """See `Learner.weight_specs`."""
        state = self._causal_lm.state_dict()
        dtype = _WIRE_DTYPE[self._published_dtype]
        return [(name, dtype, tuple(state[name].shape)) for name in storage.untied_names(self._causal_lm)]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Learner.weights`."""
        state = self._causal_lm.state_dict()
        for name in storage.untied_names(self._causal_lm):
            yield name, state[name].detach().to(self._published_dtype).contiguous()

    def save(self, folder: Path, state: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
        """See `Learner.save`."""
        error = None
        if self._ranks.is_first:
            try:
                self._write(folder, state, facts or {})
            except _WRITE_ERRORS as caught:
                error = caught
        distributed.raise_together(self._ranks, error, f"write the checkpoint {folder}")

    def _write(self, folder: Path, state: dict[str, Any], facts: dict[str, Any]) -> None:
        with atomic_folder(folder, {**facts, "format": storage.FORMAT, "step": self.step}) as writing:
            trained_dtype = next(self._causal_lm.parameters()).dtype
            storage.write_model(self._causal_lm, writing / "model", self._model_path, trained_dtype)
            storage.write_optimizer(self._causal_lm, self._optimizer.unwrap(), writing / "optimizer.safetensors")
            storage.write_learner(writing / "learner.json", self.step, self._settings.model_dump(mode="json"), state)

    def load(self, folder: Path) -> dict[str, Any]:
        """See `Learner.load`."""
        saved = storage.read_learner(folder)
        storage.read_model(self._causal_lm, folder / "model")
        storage.read_optimizer(self._causal_lm, self._optimizer.unwrap(), folder / "optimizer.safetensors")
        self.step = saved["step"]
        return saved["state"]

    def export(self, folder: Path) -> None:
        """See `Learner.export`."""
        error = None
        if self._ranks.is_first:
            try:
                with atomic_folder(folder) as writing:
                    storage.write_model(self._causal_lm, writing, self._model_path, self._published_dtype)
            except _WRITE_ERRORS as caught:
                error = caught
        distributed.raise_together(self._ranks, error, f"write the model {folder}")
