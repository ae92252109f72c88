"""The rows of supervised fine-tuning, step by step, and what of the run file has an effect there. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from quartet_common.config import ConfigError, LoadedConfig, validate_section
from quartet_common.model_folder import fixed_rope_length
from quartet_common.run_file import Problems
from quartet_common.sft import SftSection
from quartet_trainer.algorithms.sft import Sft
from quartet_trainer.config import TrainerSection
from quartet_trainer.errors import LearnerError
from quartet_trainer.rows import Row, RowReader, rows_of_step

Config = LoadedConfig[TrainerSection]

_RUN = {"id", "folder", "labels", "max_steps", "system_prompt", "add_special_tokens"}
_TRAINER = {
    *("plugin", "tp_size", "pp_size", "sp_size", "zero_stage", "offload_optimizer", "lora", "ranks", "interface"),
    *("rendezvous_seconds", "torch_threads", "stall_seconds", "precision", "gradient_checkpointing", "seed"),
    *("learning_rate", "adam_betas", "adam_epsilon", "weight_decay", "max_grad_norm"),
    *("schedule", "warmup_steps", "schedule_steps", "min_learning_rate_ratio"),
    *("micro_batch_tokens", "max_padding", "share_prompts"),
    *("evaluation", "early_stop", "checkpoint", "tensorboard", "callbacks"),
}
"""Keys of [run] and [trainer] that have an effect."""


def without_effect(config: Config) -> list[str]:
    """Return the keys of [run] and [trainer] that the run file sets and fine-tuning does not use."""
    run, trainer = config.file.section("run").keys() - _RUN, config.file.section("trainer").keys() - _TRAINER
    if "timeout_seconds" in config.section.evaluation.model_fields_set:
        trainer |= {"evaluation.timeout_seconds"}
    return sorted([*(f"run.{key}" for key in run), *(f"trainer.{key}" for key in trainer)])


def sft_config(config: Config, steps: int = 0) -> Config:
    """Return the configuration with the loss of fine-tuning, and the defaults of all keys that have no effect.

    `steps`: the length of the training, and so of the schedule; 0: not known yet.
    """
    section = config.section
    unused = {name: field.get_default() for name, field in type(section).model_fields.items() if name not in _TRAINER}
    section = section.model_copy(update={**unused, "algorithm": Sft()})
    run = config.run.model_copy(update={"max_steps": steps or config.run.max_steps, "sampling_masks": False})
    run = run.model_copy(update={"router_replay": False, "teachers": {}})
    return dataclasses.replace(config, section=section, run=run)


def sft_section(config: Config) -> SftSection:
    """Return [sft]. Raises ConfigError with all problems, also those of keys that belong together."""
    section = validate_section(SftSection, config.file.section("sft"), "sft", config.file)
    with Problems() as problems:
        if section.data is None:
            problems.add("sft.data is missing: it names the source of the training rows, such as a JSONL file")
        if not section.epochs and not config.run.max_steps:
            problems.add("sft.epochs = 0 goes on until run.max_steps, which is not set: set either above 0")
        for key, source in section.sources():
            if not source.is_lines:
                problems.add(
                    f"{key}: the trainer alone reads JSONL whose rows have the fields' names, not '{source.title}'; "
                    "`quartet sft` converts other sources"
                )
            elif source.path is not None and not source.path.is_file():
                problems.add(f"{key}: there is no file '{source.path}'; it would be '{source.path.absolute()}'")
        unknown = set(config.section.evaluation.sets or ()) - section.evaluation.keys()
        if unknown:
            known = ", ".join(section.evaluation) or "none"
            problems.add(f"trainer.evaluation.sets: [sft.evaluation] has no set '{min(unknown)}'; allowed: {known}")
        metrics = [f"eval/{name}/loss" for name in config.section.evaluation.sets or section.evaluation]
        best, stop = config.section.checkpoint, config.section.early_stop
        for key, metric, mode_key, mode in (
            ("checkpoint.best_metric", best.best_metric, "checkpoint.best_mode", best.best_mode),
            ("early_stop.metric", stop.metric, "early_stop.mode", stop.mode),
        ):
            if metric and metric not in metrics:
                allowed = ", ".join(metrics) or "none: [sft.evaluation] is empty"
                problems.add(f"trainer.{key}: no evaluation has '{metric}'; allowed: {allowed}")
            elif metric and mode == "max":
                problems.add(f'trainer.{key}: a lower loss is better; set trainer.{mode_key} = "min"')
    return section


@dataclass(frozen=True)
class SftData:
    """The rows of a fine-tuning."""

    section: SftSection
    train: list[Row]
    evaluation: dict[str, list[Row]]
    steps: int
    """Of the whole training; the last may have fewer rows."""

    @classmethod
    def read(cls, config: Config, model: dict[str, Any]) -> SftData:
        """Read all rows; `model` is the model's config.json. Raises ConfigError."""
        section, path = sft_section(config), config.model.path
        assert path is not None, "preflight checked it"
        text = model.get("text_config") or model
        readable = min(filter(None, (text.get("max_position_embeddings"), fixed_rope_length(model))), default=0)
        if section.max_tokens and readable and section.max_tokens > readable:
            raise ConfigError(f"sft.max_tokens: got {section.max_tokens}; the model reads at most {readable}")
        longest = section.max_tokens or readable or None
        reader = RowReader(path, text["vocab_size"], longest, config.run, section)
        rows = {}
        with Problems() as problems:
            for key, source in section.sources():
                assert source.path is not None, "sft_section checked it"
                with problems.collecting(LearnerError):
                    rows[key] = reader.read(source.path, key)
        train, *sets = rows.values()
        steps = -(-section.epochs * len(train) // section.rows_per_step)
        steps = min(filter(None, (steps, config.run.max_steps)))
        chosen = config.section.evaluation.sets
        evaluation = dict(zip(section.evaluation, sets, strict=True))
        return cls(section, train, {name: evaluation[name] for name in chosen or evaluation}, steps)

    def batch(self, step: int) -> list[Row]:
        """Return the rows of a step: all passes after one another, so that none is left out."""
        section, count = self.section, len(self.train)
        places = list(rows_of_step(step, section.rows_per_step, count, section.shuffle_seed, section.shuffle))
        left = section.epochs * count - step * section.rows_per_step
        return [self.train[place] for place in (places[:left] if section.epochs else places)]

    def batches(self, name: str) -> Iterator[list[Row]]:
        """Yield the rows of an evaluation set, as many at a time as a step has."""
        rows, at_once = self.evaluation[name], self.section.rows_per_step
        return (rows[begin : begin + at_once] for begin in range(0, len(rows), at_once))

    def epoch(self, step: int) -> float:
        """Return the passes over the rows before `step`; the last step may have fewer rows than the others."""
        passes = step * self.section.rows_per_step / len(self.train)
        return min(passes, self.section.epochs) if self.section.epochs else passes

    def summary(self) -> dict[str, Any]:
        """Return what a dry run prints."""
        return {
            "rows": len(self.train),
            "tokens": sum(row.token_ids.size for row in self.train),
            "tokens_in_loss": sum(int(row.in_loss.sum()) for row in self.train),
            "steps": self.steps,
            "evaluation": {name: len(rows) for name, rows in self.evaluation.items()},
        }

    def digest(self) -> str:
        """Return what determines the rows of every step, in hex."""
        found = blake2b(digest_size=16)
        for row in self.train:
            found.update(row.token_ids.size.to_bytes(8, "little") + row.token_ids.tobytes() + row.in_loss.tobytes())
        order = self.section.rows_per_step, self.section.shuffle, self.section.shuffle_seed
        found.update(repr(order).encode())
        return found.hexdigest()
