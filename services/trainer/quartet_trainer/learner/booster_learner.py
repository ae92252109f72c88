"""The learner on ColossalAI's Booster, under any plugin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from colossalai.interface import OptimizerWrapper
from quartet.v1 import experience_pb2, tensor_pb2
from safetensors import SafetensorError
from transformers import PreTrainedModel

from quartet_common.log import get_logger
from quartet_trainer.algorithms import create_algorithm
from quartet_trainer.batches import ExperienceBatch, StepPlan, decode_groups, plan_step
from quartet_trainer.checkpoints import atomic_folder
from quartet_trainer.learner import distributed, storage
from quartet_trainer.learner.accumulation import Accumulator
from quartet_trainer.learner.base import LearnerError, RunLike
from quartet_trainer.learner.metrics import PEAKS, batch_metrics, computed_metrics
from quartet_trainer.learner.model_folder import check_model_folder
from quartet_trainer.learner.optimizer import LearningRate, create_optimizer
from quartet_trainer.learner.plugins import create_plugin
from quartet_trainer.learner.policy import load_causal_lm
from quartet_trainer.learner.settings import LearnerSettings
from quartet_trainer.losses.aggregation import token_weights

log = get_logger(__name__)

Tensors = Iterator[tuple[str, torch.Tensor]]

_WIRE_DTYPE = {
    torch.float32: tensor_pb2.DTYPE_FLOAT32,
    torch.bfloat16: tensor_pb2.DTYPE_BFLOAT16,
    torch.float16: tensor_pb2.DTYPE_FLOAT16,
}
_WRITE_ERRORS = (OSError, TypeError, ValueError, RuntimeError, SafetensorError)


class BoosterLearner:
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
        self._plugin = create_plugin(settings, self._ranks)
        self._plugin.boost(self._load(dtype), lambda model: create_optimizer(model, settings))
        if settings.kl_coefficient > 0:
            self._plugin.keep_reference(self._load(dtype, frozen=True))
        self._accumulator = Accumulator(settings, self._algorithm, self._plugin)

    def _load(self, dtype: torch.dtype, *, frozen: bool = False) -> PreTrainedModel:
        causal_lm = load_causal_lm(self._model_path, dtype)
        causal_lm.train()
        if self._settings.gradient_checkpointing and not frozen:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return causal_lm

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
            rank=self._plugin.data_rank,
            world_size=self._plugin.data_size,
        )

    def _update(self, learning_rate: float) -> float:
        """One optimizer step; returns the gradient's norm. A gradient that is not finite leaves all as it was."""
        max_norm = self._settings.max_grad_norm or torch.inf
        grad_norm = self._plugin.clip_gradient(max_norm)
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
    def _optimizer(self) -> OptimizerWrapper:
        return self._plugin.optimizer

    @property
    def _causal_lm(self) -> PreTrainedModel:
        """This rank's part of the model."""
        return self._plugin.causal_lm

    def weight_specs(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """See `Learner.weight_specs`."""
        dtype = _WIRE_DTYPE[self._published_dtype]
        return [(name, dtype, tuple(shape)) for name, shape in self._plugin.specs.items()]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Learner.weights`."""
        for name, tensor in self._plugin.weights():
            yield name, tensor.to(self._published_dtype).contiguous()

    def save(self, folder: Path, state: dict[str, Any], facts: dict[str, Any] | None = None) -> None:
        """See `Learner.save`."""
        write = self._writer(folder, state, facts)
        self._write_together(
            write, self._plugin.weights(), self._plugin.moments(), what=f"write the checkpoint {folder}"
        )

    def snapshot(self, state: dict[str, Any], facts: dict[str, Any] | None = None) -> Callable[[Path], None]:
        """See `Learner.snapshot`."""
        copies: list[list[tuple[str, torch.Tensor]]] = []
        for tensors in (self._plugin.weights(), self._plugin.moments()):  # collective: every rank goes through them
            copies.append([])
            for name, tensor in tensors:
                if self._ranks.is_first:
                    copies[-1].append((name, tensor.detach().to("cpu", copy=True)))
        write = self._writer(Path(), state, facts)

        def write_copies(folder: Path) -> None:
            try:
                write(*map(iter, copies), folder)
            except _WRITE_ERRORS as error:
                raise LearnerError(f"could not write the checkpoint {folder}: {error}") from error

        return write_copies if self._ranks.is_first else lambda folder: None

    def _writer(self, place: Path, state: dict[str, Any], facts: dict[str, Any] | None) -> Callable[..., None]:
        """What writes weights and moments of the present step as a checkpoint, whenever it is called."""
        step, settings, specs = self.step, self._settings.model_dump(mode="json"), self._plugin.specs
        dtype = next(self._causal_lm.parameters()).dtype

        def write(weights: Tensors, moments: Tensors, folder: Path = place) -> None:
            with atomic_folder(folder, {**(facts or {}), "format": storage.FORMAT, "step": step}) as writing:
                storage.write_model(weights, specs, writing / "model", self._model_path, dtype)
                storage.write_optimizer(moments, writing / "optimizer.safetensors")
                storage.write_learner(writing / "learner.json", step, settings, state)

        return write

    def export(self, folder: Path) -> None:
        """See `Learner.export`."""

        def write(weights: Tensors) -> None:
            with atomic_folder(folder) as writing:
                storage.write_model(weights, self._plugin.specs, writing, self._model_path, self._published_dtype)

        self._write_together(write, self._plugin.weights(), what=f"write the model {folder}")

    def _write_together(self, write: Callable[..., None], *collective: Tensors, what: str) -> None:
        """Have rank 0 write what all ranks gather. The others go through the same, and so does rank 0 if it fails."""
        error = None
        if self._ranks.is_first:
            try:
                write(*collective)
            except _WRITE_ERRORS as caught:
                error = caught
        for tensors in collective:
            for _ in tensors:
                pass
        distributed.raise_together(self._ranks, error, what)

    def load(self, folder: Path) -> dict[str, Any]:
        """See `Learner.load`."""
        saved = storage.read_learner(folder)
        storage.read_model(self._plugin, folder / "model")
        storage.read_optimizer(self._plugin, folder / "optimizer.safetensors")
        self.step = saved["step"]
        return saved["state"]
