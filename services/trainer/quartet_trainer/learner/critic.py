"""PPO's critic: a value model with its own optimizer, or a value head that is trained with the policy."""

from __future__ import annotations

import math
import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from quartet_common.log import get_logger
from quartet_trainer.algorithms import CriticSection
from quartet_trainer.algorithms.losses import clipped_value_loss
from quartet_trainer.batch import ExperienceBatch, MicroBatch, StepPlan, collate
from quartet_trainer.batch.collate import Packing
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner import distributed
from quartet_trainer.learner.attention import attends_packed, last_hidden_state, trunk
from quartet_trainer.learner.checks import CRITIC_KEY, check_model_folder, copy_companions
from quartet_trainer.learner.model import ValueHead, autocast_to, load_causal_lm
from quartet_trainer.learner.optimizer import LearningRate, create_optimizer
from quartet_trainer.learner.plugins import Plugin
from quartet_trainer.learner.plugins.base import Phases
from quartet_trainer.learner_settings import LearnerSettings
from quartet_trainer.progress import PROGRESS

log = get_logger(__name__)

VALUE_HEAD = "value_head.safetensors"
"""Of an exported critic: "weight" [1, H] and "bias" [1], beside the trunk's own files."""


@dataclass(frozen=True)
class CriticTargets:
    """What the critic learns from a batch."""

    plan: StepPlan
    """A separate critic's: completions with a trained token, distributed over all ranks. A head's: the policy's."""
    old_values: Tensor
    """float64 [T]."""
    returns: Tensor
    """float64 [T]."""


class ValueModel(nn.Module):
    """A transformers base model with a value head. `autocast`: dtype of matrix products; None: the weights' own."""

    def __init__(self, trunk: nn.Module, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(trunk.config.hidden_size, next(trunk.parameters()).dtype)
        self._autocast_dtype = autocast

    def forward(self, input_ids: Tensor, rows: Tensor, columns: Tensor, packing: Packing | None) -> Tensor:
        """The value [t] of each state in which a token was chosen: of all tokens up to `columns` in its row.

        Args:
            input_ids, rows, columns, packing: as `Policy` takes them.
        """
        with autocast_to(self._autocast_dtype, input_ids.device):
            hidden = last_hidden_state(self.trunk, input_ids, packing)[rows, columns]
        return self.head(hidden)


def _learning_rate(settings: LearnerSettings, critic: CriticSection, max_steps: int) -> LearningRate:
    if critic.learning_rate is not None:
        settings = settings.model_copy(update={"learning_rate": critic.learning_rate})
    return LearningRate(settings, max_steps)


class Critic:
    """A separate value model. Methods are collective.

    Under every plugin of the policy, it has TorchDDPPlugin: each rank holds the whole critic and computes its share of
    the batch among all ranks.
    """

    file = "critic.safetensors"

    def __init__(
        self, settings: LearnerSettings, critic: CriticSection, model_path: Path, plugin: Plugin, max_steps: int
    ) -> None:
        """Load and boost it.

        Args:
            settings, critic: the optimizer's, and its own.
            model_path: the policy's folder, used if `critic.model` is unset.
            plugin: the policy's, already boosted.
            max_steps: steps of the run.

        Raises:
            ModelFolderError, LearnerError: its folder cannot be used.
        """
        self._path = path = critic.model or model_path
        check_model_folder(path, CRITIC_KEY if critic.model else "model.path")
        self._plugin = plugin
        self._clip = critic.value_clip
        self._max_grad_norm = settings.max_grad_norm or math.inf
        self._learning_rate = _learning_rate(settings, critic, max_steps)
        with distributed.in_turn(plugin.ranks):
            causal_lm = load_causal_lm(path, plugin.dtype, share_prompts=settings.share_prompts, critic=True)
            causal_lm.to(plugin.ranks.device)
        self.shares_prompts = attends_packed(causal_lm)
        vocabulary = plugin.causal_lm.config.vocab_size
        if causal_lm.config.vocab_size != vocabulary:
            raise LearnerError(
                f"{CRITIC_KEY}: {path} has a vocabulary of {causal_lm.config.vocab_size}, "
                f"the policy one of {vocabulary}; they must read the same tokens"
            )
        causal_lm.train()
        if settings.gradient_checkpointing:
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model = ValueModel(trunk(causal_lm), torch.bfloat16 if settings.precision == "bf16" else None)
        if critic.model and (path / VALUE_HEAD).is_file():
            model.head.load_state_dict(load_file(path / VALUE_HEAD))
        self._booster = Booster(plugin=TorchDDPPlugin(gradient_as_bucket_view=True, broadcast_buffers=False))
        self._model, self._optimizer, *_ = self._booster.boost(model, create_optimizer(model, settings))

    def values(self, micro_batch: MicroBatch) -> Tensor:
        """The values [t] of a micro-batch's tokens, without gradient. Local."""
        with torch.no_grad():
            return self._model.unwrap()(*micro_batch.states)

    def learn(self, batch: ExperienceBatch, targets: CriticTargets, step: int) -> dict[str, float]:
        """Take one optimizer step toward the returns. Returns metrics, the same on every rank."""
        phases = Phases(self._plugin.ranks.device)
        phases.begin("all")
        sums = self.accumulate(batch, targets)
        grad_norm = self._optimizer.clip_grad_by_norm(self._max_grad_norm, foreach=True).item()
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        if math.isfinite(grad_norm):
            self._optimizer.step()
        else:
            log.warning("the critic's optimizer step skipped: its gradient is not finite", extra={"step": step})
        self._optimizer.zero_grad()
        seconds = torch.tensor([phases.end()["all"]], dtype=torch.float64, device=sums.device)
        distributed.sum_and_max(sums, seconds)

        return {
            "value_loss": sums[0].item(),
            "value_clip_ratio": sums[1].item() / max(1, int(targets.plan.mask.sum())),
            "critic_grad_norm": grad_norm,
            "critic_seconds": seconds.item(),
        }

    def accumulate(self, batch: ExperienceBatch, targets: CriticTargets) -> Tensor:
        """Add the gradient of the mean loss over the global batch's trained tokens.

        Returns:
            This rank's part of the loss and its count of clipped tokens, float64 [2].
        """
        plan, plugin = targets.plan, self._plugin
        scale = 1 / max(1, int(plan.mask.sum()))
        sums = torch.zeros(2, dtype=torch.float64, device=plugin.ranks.device)
        for index, completions in enumerate(plan.micro_batches):
            PROGRESS.advance()
            micro_batch = collate(batch, plan, completions).to(plugin.ranks.device, plugin.dtype)
            is_last = index == len(plan.micro_batches) - 1
            with nullcontext() if is_last else self._booster.no_sync(self._model, self._optimizer):
                values = self._model(*micro_batch.states)
                chosen = micro_batch.tokens.cpu()
                old, returns = targets.old_values[chosen].to(values), targets.returns[chosen].to(values)
                losses, clipped = clipped_value_loss(values, old, returns, self._clip)
                loss = losses.sum() * (0.0 if plan.idle else scale)
                self._booster.backward(loss * plugin.ranks.world_size, self._optimizer)
            if not plan.idle:
                sums += torch.stack([loss.detach(), clipped.sum()]).to(sums)
        return sums

    def export(self, folder: Path) -> None:
        """Write a folder that `critic.model` takes: the trunk, as transformers saves it, and the value head. Local."""
        model = self._model.unwrap()
        model.trunk.save_pretrained(folder)
        save_file({name: tensor.cpu() for name, tensor in model.head.state_dict().items()}, folder / VALUE_HEAD)
        shutil.copyfile(self._path / "config.json", folder / "config.json")  # of a language model, as `critic.model` is
        copy_companions(self._path, folder)

    def copies(self) -> dict[str, Tensor]:
        """Weights "model/NAME" and AdamW's state "MOMENT/NAME" for a checkpoint, copied to the CPU. Local."""
        tensors = {}
        states = self._optimizer.unwrap().state
        for name, parameter in self._model.unwrap().named_parameters():
            for kind, value in {"model": parameter, **states.get(parameter, {})}.items():
                tensors[f"{kind}/{name}"] = value.detach().to("cpu", copy=True).contiguous()
        return tensors

    def load(self, file: Path) -> None:
        """Restore what `copies` returned from `file`. Local.

        Raises:
            LearnerError: there is no file, or it is of another model.
        """
        if not file.is_file():
            raise LearnerError(f"{file.parent} has no critic; it was not written by a training with one")
        tensors = load_file(file)
        optimizer = self._optimizer.unwrap()
        optimizer.state.clear()
        for name, parameter in self._model.unwrap().named_parameters():
            weights = tensors.pop(f"model/{name}", None)
            if weights is None or weights.shape != parameter.shape:
                raise LearnerError(f"{file} is of another critic: {name} is missing or of another shape")
            with torch.no_grad():
                parameter.copy_(weights)
            state = {key: tensors.pop(f"{key}/{name}", None) for key in ("exp_avg", "exp_avg_sq", "step")}
            if state["step"] is not None:
                optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
        if tensors:
            raise LearnerError(f"{file} is of another critic: it has {min(tensors)}")


class HeadCritic:
    """A value head on the policy, which shares its forward, backward, optimizer and gradient norm.

    A checkpoint has the head in a separate file; it is neither published nor exported.
    """

    file = "value_head.safetensors"

    def __init__(self, settings: LearnerSettings, critic: CriticSection, plugin: Plugin, max_steps: int) -> None:
        """`plugin` is boosted and has a value head; `max_steps` are the run's."""
        assert plugin.value_head is not None
        self._plugin = plugin
        self._head = plugin.value_head
        self._coefficient = critic.value_coefficient
        self._clip = critic.value_clip
        self.learning_rate = _learning_rate(settings, critic, max_steps)
        """Of the head's weights; the trunk has the policy's."""

    def loss(self, micro_batch: MicroBatch, values: Tensor, targets: CriticTargets) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of value_coefficient * the mean loss over the batch's trained tokens. Local.

        Args:
            micro_batch: on the training device.
            values: float [t], with gradient.
            targets: of the whole batch.

        Returns:
            The part, and by names of `metrics.SUMS` the sums over tokens of the loss and of the clipped ones.
        """
        chosen = micro_batch.tokens.cpu()
        old, returns = targets.old_values[chosen].to(values), targets.returns[chosen].to(values)
        losses, clipped = clipped_value_loss(values, old, returns, self._clip)
        part = losses.sum() * (0.0 if targets.plan.idle else 1 / max(1, int(targets.plan.mask.sum())))
        return self._coefficient * part, {"value_loss": losses.detach().sum(), "value_clip_ratio": clipped.sum()}

    def copies(self) -> dict[str, Tensor]:
        """Weights "model/NAME" and AdamW's state "MOMENT/NAME", whole, for a checkpoint, on the CPU. Collective."""
        tensors = {}
        states = self._plugin.optimizer.unwrap().state
        for name, parameter in self._head.named_parameters():
            held = self._plugin.trained(parameter)
            for kind, value in {"model": held, **states.get(held, {})}.items():
                whole = value if value.ndim == 0 else self._plugin.whole(parameter, value)
                tensors[f"{kind}/{name}"] = whole.detach().to("cpu", copy=True).contiguous()
        return tensors

    @torch.no_grad()
    def load(self, file: Path) -> None:
        """Restore what `copies` returned, under any plugin, from `file`. Local.

        Raises:
            LearnerError: there is no file, or it is of another model.
        """
        if not file.is_file():
            raise LearnerError(f"{file.parent} has no value head; it was not written with critic.form = 'head'")
        tensors, plugin = load_file(file), self._plugin
        for name, parameter in self._head.named_parameters():
            weights = tensors.get(f"model/{name}")
            if weights is None or weights.shape != parameter.shape:
                raise LearnerError(f"{file} is of another critic: {name} is missing or of another shape")
            held = plugin.trained(parameter)
            parameter.copy_(weights)
            held.copy_(plugin.piece(name, weights))
            names = {key: f"{key}/{name}" for key in ("exp_avg", "exp_avg_sq", "step")}
            if names["step"] in tensors:
                moments = {key: tensors[stored] for key, stored in names.items()}
                plugin.optimizer.unwrap().state[held] = {
                    key: value.to(held.device)
                    if value.ndim == 0
                    else plugin.piece(name, value).to(held.device, held.dtype).contiguous()
                    for key, value in moments.items()
                }
