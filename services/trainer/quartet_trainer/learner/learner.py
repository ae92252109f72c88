"""The learner: the model being trained, its optimizer and its algorithm, spread over the ranks of one job."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from colossalai.interface import OptimizerWrapper
from quartet.v1 import experience_pb2, rollout_pb2, tensor_pb2, trainer_pb2
from safetensors.torch import save_file
from transformers import PreTrainedModel

from quartet_common.config import RunSection
from quartet_common.hub import folder_of
from quartet_common.log import get_logger
from quartet_common.model_folder import fixed_rope_length, folder_checksum
from quartet_trainer.batch import ExperienceBatch, decode_group, decode_groups
from quartet_trainer.errors import LearnerError
from quartet_trainer.learner import distributed, storage
from quartet_trainer.learner.accumulation import Accumulator
from quartet_trainer.learner.checks import CRITIC_KEY, check_model_folder, check_recorded, model_dtype
from quartet_trainer.learner.coefficients import Coefficients
from quartet_trainer.learner.critic import Critic, HeadCritic
from quartet_trainer.learner.distributed import Announcements
from quartet_trainer.learner.lora import check_base, write_adapter_files
from quartet_trainer.learner.metrics import MEANS_OF_UPDATES, PEAKS, SUMS, batch_metrics, computed_metrics
from quartet_trainer.learner.model import ValueHead, as_in_files, load_causal_lm, shapes_in_files, without_weights
from quartet_trainer.learner.optimizer import LearningRate, create_optimizer
from quartet_trainer.learner.planner import Planner, Update
from quartet_trainer.learner.plugins import create_plugin
from quartet_trainer.learner.ptx import PretrainingTexts
from quartet_trainer.learner.router import routing_of
from quartet_trainer.learner_settings import REFERENCE_KEY, LearnerSettings
from quartet_trainer.progress import PROGRESS
from quartet_trainer.rows import RowReader
from quartet_trainer.status import Status
from quartet_weights.routed_experts import ReplayExperts

log = get_logger(__name__)

Tensors = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class _Done:
    """The metrics of one optimizer step, not yet summed over ranks and steps."""

    sums: torch.Tensor
    """This rank's, float64 in the order of `metrics.SUMS`."""
    peaks: dict[str, float]
    """This rank's, by `metrics.PEAKS`."""
    metrics: dict[str, float]
    """The same on every rank."""


class Learner:
    """The model being trained, on ColossalAI's Booster under any plugin.

    Methods are collective unless marked local: all ranks call them, in the same order, with the same arguments.
    """

    step: int = 0
    """Batches trained on, which is the policy version of the weights."""
    undone: int = 0
    """Those of `step` that are not in the weights, because the run was rolled back."""
    announcements: Announcements | None = None
    """Set on rank 0 of several ranks: it announces each collective call, which the others repeat in `follow`."""

    def __init__(self, settings: LearnerSettings, model_path: Path, run: RunSection) -> None:
        """Load the model and boost it. See `quartet_trainer.learner.create_learner`."""
        config = check_model_folder(model_path)
        self._model_path = model_path
        self._algorithm = settings.algorithm
        critic = self._algorithm.value_model()
        critics = check_model_folder(critic.model, CRITIC_KEY) if critic and critic.model else {}
        lengths = [fixed_rope_length(read) for read in (config, critics)]
        self._longest = min(filter(None, lengths), default=None)
        self._learning_rate = LearningRate(settings, run.max_steps)
        self._sampling_masks = run.sampling_masks
        check_recorded(settings, sampling_masks=run.sampling_masks, router_replay=run.router_replay)
        self._ranks = distributed.initialize(settings.seed)
        self._writing_ranks = distributed.WritingRanks(self._ranks)
        self._settings = settings = settings.on(self._ranks.device.type)
        # Rollouts run in the folder's own dtype; training may use a higher precision.
        self._published_dtype = getattr(torch, model_dtype(config))

        dtype = torch.float64 if settings.precision == "fp64" else torch.float32
        self._plugin = create_plugin(settings, self._ranks)
        with distributed.in_turn(self._ranks):
            causal_lm = self._load(dtype)
            self._plugin.inspect(causal_lm)
            if run.router_replay:
                self._plugin.routing = routing_of(causal_lm)
            if not settings.lora.r:  # with an adapter, the base model's weights are not read again below
                without_weights(causal_lm)
        if critic and critic.form == "head":
            self._plugin.value_head = ValueHead(causal_lm.config.hidden_size, dtype)
        self._plugin.boost(causal_lm, lambda model: create_optimizer(model, settings, self._plugin.value_head))
        del causal_lm
        if not settings.lora.r:
            storage.read_model(self._plugin, model_path, foreign=True)
        self._buffers_in_files = {name for name, _ in as_in_files(self._causal_lm, self._plugin.buffers.items())}
        self._plugin.verify()
        self._base_checksum = folder_checksum(model_path) if settings.lora.r else 0
        if settings.lora.path:
            check_base(settings.lora.path, model_path)
            storage.read_model(self._plugin, settings.lora.path)
        self._teachers = bool(run.teachers)
        if settings.kl_coefficient > 0 or (settings.distillation.coefficient and not self._teachers):
            other = settings.reference.model and folder_of(settings.reference.model, REFERENCE_KEY)
            self._plugin.keep_reference(lambda: self._load(dtype, frozen=True, other=other), other=other is not None)
        self._kl_in_loss = settings.kl_coefficient > 0 and self._algorithm.kl_in == "loss"
        self._plugin.reference_in_loss = self._kl_in_loss
        self._reference_weights: list[tuple[str, torch.Tensor]] = []
        """This rank's share of the reference model, for checkpoints; empty while it has the initial weights."""
        texts, config = None, self._causal_lm.config
        if settings.ptx.coefficient:
            lengths = [getattr(config, "max_position_embeddings", None), self._longest]
            longest = min(filter(None, lengths), default=None)
            texts = PretrainingTexts(settings, RowReader(model_path, config.vocab_size, longest, run))
        self._critic: Critic | HeadCritic | None = None
        head = None
        if critic and self._plugin.value_head is not None:
            self._critic = head = HeadCritic(settings, critic, self._plugin, run.max_steps)
        elif critic:
            self._critic = Critic(settings, critic, model_path, self._plugin, run.max_steps)
        self._head_rate = head.learning_rate if head else self._learning_rate
        self._coefficients = Coefficients(settings)
        self._accumulator = Accumulator(settings, self._plugin, self._coefficients, texts, head)
        length = run.sampling.max_new_tokens
        self._planner = Planner(settings, self._plugin, self._coefficients, length, self._critic)

    def _load(self, dtype: torch.dtype, *, frozen: bool = False, other: Path | None = None) -> PreTrainedModel:
        share = self._settings.share_prompts and self._settings.plugin != "hybrid_parallel"
        causal_lm = load_causal_lm(other or self._model_path, dtype, share_prompts=share)
        causal_lm.train()
        if self._settings.gradient_checkpointing and not frozen:
            again = {"use_reentrant": False, "context_fn": ReplayExperts.checkpoint_contexts}
            causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=again)
        return causal_lm

    @property
    def _decode_arguments(self) -> dict[str, Any]:
        """The arguments of `decode_groups` for this model and run."""
        return {
            "vocabulary_size": self._causal_lm.config.vocab_size,
            "sampling_masks": self._sampling_masks,
            "routing": self._plugin.routing,
            "longest": self._longest,
            "teachers": self._teachers,
        }

    def idle(self) -> None:
        """While rank 0 waits: call every few minutes, so that the other ranks do not time out."""
        self._announce("idle")

    def stop(self) -> None:
        """End `follow` on the other ranks."""
        self._announce("stop")

    def follow(self, announcements: Announcements, status: Status) -> None:
        """On a rank above 0: repeat the calls that rank 0 announces, until it announces "stop".

        Only a training step counts as work of this rank in `status`: rank 0 watches the others.

        Raises:
            TrainingError: the connection to rank 0 is lost.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint") as executor:
            while (received := announcements.receive())[0] != "stop":
                command, groups, arguments = received
                match command:
                    case "train_step":
                        with status.during(trainer_pb2.TRAINER_PHASE_TRAINING):
                            self.train_step([experience_pb2.GroupTensors.FromString(group) for group in groups])
                        status.batches += 1
                    case "log_probs":
                        self.log_probs([experience_pb2.GroupTensors.FromString(group) for group in groups])
                    case "weights":
                        deque(self.weights(), maxlen=0)
                    case "snapshot":
                        # If it fails, rank 0's call raises the error.
                        executor.submit(self.snapshot(Path(arguments["folder"]), arguments["facts"]))
                    case "load":
                        self.load(Path(arguments["folder"]))
                    case "export":
                        self.export(Path(arguments["folder"]))
                    case "idle":
                        pass
                    case _:
                        raise ValueError(f"rank 0 announced an unknown command: '{command}'")
        log.info("rank 0 has ended the training")

    def _announce(self, command: str, groups: Sequence[experience_pb2.GroupTensors] = (), **arguments: Any) -> None:
        if self.announcements is not None:
            PROGRESS.advance()
            PROGRESS.sending = True
            try:
                self.announcements.send(command, [group.SerializeToString() for group in groups], **arguments)
            finally:
                PROGRESS.sending = False

    def check_group(self, group: experience_pb2.GroupTensors) -> None:
        """Raise ExperienceError if `train_step` would refuse this group. Local; thread-safe."""
        decode_group(group, **self._decode_arguments)

    def train_step(self, groups: Sequence[experience_pb2.GroupTensors]) -> dict[str, float]:
        """Train on one global batch.

        Args:
            groups: the whole batch, in the same order on every rank; each rank computes its share. The order decides
                which groups make a mini-batch together.

        Returns:
            Metrics of the global batch, the same on every rank; `quartet_trainer.learner.metrics` names them.

        Raises:
            quartet_trainer.batch.ExperienceError: a group violates the contract; no weight has changed.
        """
        self._announce("train_step", groups)
        started = time.perf_counter()
        batch = decode_groups(groups, **self._decode_arguments)
        plan, updates, known = self._planner.updates(batch, self.step)
        learning_rate = self._learning_rate(self.step - self.undone)
        done = [self._update(batch, update, number, learning_rate) for number, update in enumerate(updates)]
        peaks = {name: sum(one.peaks[name] for one in done) for name in PEAKS if name.endswith("seconds")}
        peaks["log_prob_diff_max"] = max(one.peaks["log_prob_diff_max"] for one in done)
        peaks["train_step_seconds"] = time.perf_counter() - started
        self.step += 1
        if self._settings.reference_sync_steps and self.step % self._settings.reference_sync_steps == 0:
            self._sync_reference()

        sums = torch.stack([one.sums for one in done]).sum(0)
        sums[MEANS_OF_UPDATES] /= len(done)
        peak_values = torch.tensor([peaks[name] for name in PEAKS], dtype=torch.float64, device=sums.device)
        distributed.sum_and_max(sums, peak_values)
        means = {name: sum(one.metrics[name] for one in done) / len(done) for name in done[0].metrics}
        for name in means.keys() & {"value_loss", "value_clip_ratio"}:  # a separate critic's: means over each update
            counts = [int(update.plan.mask.sum()) for update in updates]
            total = sum(count * one.metrics[name] for count, one in zip(counts, done, strict=True))
            means[name] = total / max(1, sum(counts))
        router = self._plugin.router
        metrics = {
            **batch_metrics(batch, plan),
            **(router.metrics(distributed.sum_over_ranks(router.take())) if router else {}),
            **computed_metrics(
                sums,
                peak_values,
                kl_in_loss=self._kl_in_loss,
                ptx=self._settings.ptx.coefficient > 0,
                value_head=self._plugin.value_head is not None,
            ),
            **known,
            **means,
            **self._coefficients.metrics(),
            "learning_rate": learning_rate,
        }
        self._coefficients.adapt(metrics)
        return metrics

    def log_probs(self, groups: Sequence[experience_pb2.GroupTensors]) -> torch.Tensor:
        """Return the log-prob of each token in the loss of these groups, float64 [tokens], on the CPU; no gradient.

        Raises:
            quartet_trainer.batch.ExperienceError: a group violates the contract.
        """
        self._announce("log_probs", groups)
        return self._planner.log_probs(decode_groups(groups, **self._decode_arguments))

    def _update(self, batch: ExperienceBatch, update: Update, number: int, learning_rate: float) -> _Done:
        """Take the batch's `number`-th optimizer step, and the critic's if there is one.

        The policy's step is skipped if its gradient is not finite or the mean ratio is above the algorithm's bound.
        """
        texts = self.step * self._settings.epochs * self._settings.mini_batches + number
        sums, peaks = self._accumulator.run(batch, update.plan, texts, update.targets)
        critic: dict[str, float] = {}
        if isinstance(self._critic, Critic) and update.targets:
            critic = self._critic.learn(batch, update.targets, self.step - self.undone)
        ratio = distributed.sum_over_ranks(sums[[SUMS.index("ratio_mean"), SUMS.index("computed_tokens")]])
        mean_ratio = (ratio[0] / ratio[1].clamp(min=1)).item()

        started = time.perf_counter()
        grad_norm = self._plugin.clip_gradient(self._settings.max_grad_norm or torch.inf)
        for group in self._optimizer.param_groups:
            group["lr"] = self._head_rate(self.step - self.undone) if group.get("value_head") else learning_rate
        highest = self._algorithm.max_mean_ratio or math.inf
        updated = math.isfinite(grad_norm) and mean_ratio <= highest
        if updated:
            self._optimizer.step()
        elif mean_ratio > highest:
            log.warning(f"optimizer step skipped: the mean ratio is {mean_ratio:.3g}", extra={"step": self.step})
        else:
            log.warning("optimizer step skipped: the gradient is not finite", extra={"step": self.step})
        self._optimizer.zero_grad()
        peaks |= {"optimizer_seconds": time.perf_counter() - started, "train_step_seconds": 0.0}
        return _Done(sums, peaks, {**critic, "grad_norm": grad_norm, "update_skipped": float(not updated)})

    def _sync_reference(self) -> None:
        """Let the reference model take the policy's weights, and keep this rank's share of them."""
        self._plugin.sync_reference()
        self._reference_weights = self._own_weights()

    def _own_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Copy the weights of the files that this rank writes. Not with an adapter."""
        files = storage.model_files(self._shapes_in_files(), self._plugin.dtype, self._ranks.world_size)
        names = {name for in_file in self._files_of_this_rank(files).values() for name in in_file}
        return _copies(as_in_files(self._causal_lm, self._plugin.model_weights()), lambda name: name in names)

    @property
    def _optimizer(self) -> OptimizerWrapper:
        return self._plugin.optimizer

    @property
    def _causal_lm(self) -> PreTrainedModel:
        """This rank's part of the model."""
        return self._plugin.causal_lm

    def weight_specs(self) -> list[tuple[str, int, tuple[int, ...]]]:
        """Hugging Face's name, `quartet.v1.tensor_pb2.Dtype` and shape of each tensor of `weights`, in order. Local."""
        specs = self._plugin.specs if self._plugin.adapter else self._shapes_in_files()
        dtypes = {name: str(self._wire_dtype(name)).removeprefix("torch.").upper() for name in specs}
        return [(name, tensor_pb2.Dtype.Value(f"DTYPE_{dtypes[name]}"), tuple(specs[name])) for name in specs]

    def weights(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yield the current weights: detached, contiguous, on the training device, without a tied `lm_head`.

        A tensor may share memory with the parameter: it is valid until the next `train_step` or `load`. With several
        ranks, closing the generator early still gathers the rest, which is collective.
        """
        self._announce("weights")
        plugin = self._plugin
        named = plugin.weights() if plugin.adapter else as_in_files(self._causal_lm, plugin.model_weights())
        try:
            for name, tensor in named:
                yield name, tensor.detach().to(self._wire_dtype(name)).contiguous()
        finally:
            if self._ranks.world_size > 1:
                deque(named, maxlen=0)

    def _shapes_in_files(self) -> dict[str, torch.Size]:
        return shapes_in_files(self._causal_lm, self._plugin.model_specs)

    def _wire_dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor of `weights`. An adapter stays in float32: it is small, and B·A is added to rounded
        weights. So do buffers: engines have them in float32, and a rounded bias chooses other experts."""
        exact = self._plugin.adapter or name in self._buffers_in_files
        return torch.promote_types(self._published_dtype, torch.float32) if exact else self._published_dtype

    @property
    def lora(self) -> rollout_pb2.LoraConfig | None:
        """The adapter that `weights` yields, under PEFT's names; None if it yields the whole model. Local."""
        if self._plugin.adapter is None:
            return None
        lora = self._plugin.adapter.settings
        alpha = lora.alpha * math.sqrt(lora.r) if lora.use_rslora else lora.alpha
        return rollout_pb2.LoraConfig(
            r=lora.r, alpha=alpha, target_modules=lora.target_modules, base_checksum=self._base_checksum
        )

    @cached_property
    def parameters(self) -> int:
        """Those that each token is multiplied with: all but an input embedding that is not the output's too. Local."""
        total = sum(math.prod(shape) for shape in self._shapes_in_files().values())
        config = self._causal_lm.config
        return (
            total if getattr(config, "tie_word_embeddings", False) else total - config.vocab_size * config.hidden_size
        )

    @property
    def checkpoint_bytes(self) -> int:
        """About the size of a checkpoint: weights, those of a reference model that takes the policy's, and two moments
        of those that are trained. Local."""
        plugin = self._plugin
        sizes = {name: math.prod(shape) * plugin.dtype.itemsize for name, shape in plugin.specs.items()}
        copies = 1 + bool(self._settings.reference_sync_steps)
        return sum(size * (copies if name in plugin.frozen else copies + 2) for name, size in sizes.items())

    def snapshot(self, folder: Path, facts: dict[str, Any]) -> Callable[[], None]:
        """Copy this rank's share of a checkpoint into memory, and return a function that writes it.

        Every rank calls that function once, before the next snapshot; any thread will do, while training continues.
        When it returns, the checkpoint is complete and durable; until then nothing is at `folder`. If it cannot be
        written, the function raises LearnerError on every rank.

        Args:
            folder: e.g. `checkpoints.checkpoint_folder(root, step)`. An existing one is replaced.
            facts: the caller's entries of the manifest, serializable as JSON.
        """
        self._announce("snapshot", folder=str(folder), facts=facts)
        plugin, ranks, shapes = self._plugin, self._ranks, self._shapes_in_files()
        files = storage.model_files(shapes, plugin.dtype, ranks.world_size)
        own_files = self._files_of_this_rank(files)
        # An adapter is small: rank 0 writes all of it.
        weights = _copies(plugin.weights(), lambda _: ranks.is_first) if plugin.adapter else self._own_weights()
        folders = {"model": weights} | ({"reference": reference} if (reference := self._reference_weights) else {})
        of_moments = self._files_of_this_rank(storage.model_files(plugin.specs, plugin.dtype, ranks.world_size))
        parameters = {name for in_file in of_moments.values() for name in in_file}
        moments = _copies(plugin.moments(), lambda key: key.partition("/")[2] in parameters)
        critic_file, critic = self._critic.file if self._critic else "", {}
        if self._critic and (plugin.value_head is not None or ranks.is_first):
            critic = self._critic.copies()  # collective for a head; a separate critic is whole on every rank

        def share(writing: Path) -> None:
            if not plugin.adapter:
                for name, tensors in folders.items():
                    storage.write_weights(tensors, own_files, writing / name, plugin.dtype)
            elif ranks.is_first:
                storage.write_adapter(weights, writing / "adapter")
            storage.write_optimizer(moments, writing, ranks.rank, ranks.world_size)

        def rest(writing: Path) -> None:
            if plugin.adapter:
                write_adapter_files(writing / "adapter", plugin.adapter.settings, self._model_path, self._base_checksum)
            else:
                for name in folders:
                    dtype = self._published_dtype
                    storage.write_model_metadata(files, shapes, writing / name, self._model_path, dtype)
            if critic:
                save_file(critic, writing / critic_file)

        manifest = {
            **facts,
            "format": storage.FORMAT,
            "step": self.step,
            "undone_steps": self.undone,
            "settings": self._settings.model_dump(mode="json"),
            "coefficients": self._coefficients.state(),
        }
        return lambda: self._writing_ranks.write(folder, manifest, share, rest)

    def _files_of_this_rank(self, files: dict[str, list[str]]) -> dict[str, list[str]]:
        """The files that this rank writes."""
        ranks = self._ranks
        return {file: files[file] for number, file in enumerate(files) if number % ranks.world_size == ranks.rank}

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder, tokenizer files included, atomically like a checkpoint.

        A separate critic is written to the folder "critic" beside it.
        """
        self._announce("export", folder=str(folder))
        weights = self._plugin.model_weights()

        def write(writing: Path) -> None:
            try:
                if self._ranks.is_first:
                    named, shapes = as_in_files(self._causal_lm, weights), self._shapes_in_files()
                    exact, dtype = self._buffers_in_files, self._published_dtype
                    storage.write_model(named, shapes, writing, self._model_path, dtype, exact)
            finally:
                for _ in weights:  # collective: ranks that write nothing, or fail to, gather the rest too
                    pass

        self._writing_ranks.write(folder, None, write)
        if isinstance(critic := self._critic, Critic):
            self._writing_ranks.write(folder.with_name("critic"), None, lambda _: None, critic.export)

    def load(self, folder: Path) -> None:
        """Restore weights, reference model, optimizer state, critic and `step` from a checkpoint, before any step.

        Raises:
            LearnerError: the checkpoint is incomplete or of another model.
        """
        self._announce("load", folder=str(folder))
        manifest = storage.check_checkpoint(folder)
        trained = folder / ("adapter" if self._plugin.adapter else "model")
        if not trained.is_dir():
            other = "a whole model" if self._plugin.adapter else "an adapter"
            raise LearnerError(
                f"{folder} holds {other}: trainer.lora.r was {'0' if self._plugin.adapter else 'above 0'}"
            )
        if self._plugin.adapter:
            check_base(trained, self._model_path)
        if self._settings.kl_coefficient and (folder / "reference").is_dir():
            storage.read_model(self._plugin, folder / "reference")
            self._sync_reference()
        storage.read_model(self._plugin, trained)
        storage.read_optimizer(self._plugin, folder)
        if self._critic:
            self._critic.load(folder / self._critic.file)
        self.step, self.undone = manifest["step"], manifest.get("undone_steps", 0)
        if coefficients := manifest.get("coefficients"):  # older builds wrote none, and adapted none
            self._coefficients.load(coefficients)


def _copies(tensors: Tensors, wanted: Callable[[str], bool]) -> list[tuple[str, torch.Tensor]]:
    """Copy the wanted tensors to the CPU. Iterates over all of them on every rank, because gathering is collective."""
    return [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors if wanted(name)]
