"""What the trainer checks before it starts, and with --dry-run. Imports no torch."""

import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from quartet_common.config import ConfigError, LoadedConfig, split_address
from quartet_common.disk import GIB, check_file, check_folder, free_bytes, warn_of_little_shared_memory
from quartet_common.hub import folder_of
from quartet_common.log import get_logger
from quartet_common.model_folder import EXPERTS, check_same_vocabulary, read_safetensors_header, set_number
from quartet_common.ports import check_own_host
from quartet_common.refusals import did_you_mean
from quartet_common.run_file import Problems
from quartet_common.sampling import Effect, SamplingSection, altered
from quartet_common.sections import VerifierSection
from quartet_server.data_rows import sections_of_rows
from quartet_trainer import launch
from quartet_trainer.callbacks import check_callbacks
from quartet_trainer.checkpoints import find_checkpoints
from quartet_trainer.config import TrainerSection, check_interfaces, check_transport
from quartet_trainer.errors import LearnerError
from quartet_trainer.evaluation import metric_names
from quartet_trainer.learner.checks import (
    CRITIC_KEY,
    ModelFolderError,
    check_completion_length,
    check_model,
    check_model_folder,
    check_ranks,
    check_recorded,
    no_experts,
)
from quartet_trainer.learner_settings import LOWEST_TEMPERATURE, REFERENCE_KEY, check_schedule

log = get_logger(__name__)

Config = LoadedConfig[TrainerSection]


def preflight(config: Config) -> dict[str, Any]:
    """Check the configuration and the files that it names. Return a summary of what would run.

    Raises:
        ConfigError: names all problems.
    """
    section = config.section
    with Problems() as problems:
        with problems.collecting(ModelFolderError):
            model = _check_model(config)
            for model_check in (
                _check_length,
                _check_experts,
                _check_adapter,
                _check_plugin,
                _check_critic,
                _check_reference,
                _check_texts,
                _check_disk,
            ):
                with problems.collecting(ModelFolderError, LearnerError):
                    model_check(config, model)
        for check in (
            _check_colossalai,
            _check_folders,
            _check_store,
            _check_sampling,
            _check_mini_batches,
            _check_teachers,
            _check_evaluation_sets,
            _check_metrics,
        ):
            with problems.collecting():
                check(config)
        for settings_check in (
            lambda: check_schedule(section, config.run.max_steps),
            lambda: check_ranks(section, section.ranks),
            lambda: check_recorded(
                section, sampling_masks=config.run.sampling_masks, router_replay=config.run.router_replay
            ),
            lambda: check_transport(section.weights),
            lambda: check_interfaces(section),
            launch.check_environment,
            lambda: check_callbacks(section.callbacks),
        ):
            with problems.collecting(LearnerError):
                settings_check()
    if launch.rank() == 0:
        _warn(config)
        if section.ranks > 1:
            warn_of_little_shared_memory()
    return {
        "model": str(config.model.path),
        "algorithm": section.algorithm.model_dump(mode="json"),
        "plugin": section.plugin,
        "ranks": section.ranks,
        "broker": config.addresses.broker,
        "evaluation_sets": evaluation_sets(config),
        "folder": str(config.run.path),
    }


def preflight_sft(config: Config) -> dict[str, Any]:
    """As `preflight`, for supervised fine-tuning. Only a dry run reads the rows: a start does when it trains them."""
    from quartet_trainer.sft_data import SftData, sft_config, sft_section, without_effect  # it imports numpy

    own = sft_config(config)
    model: dict[str, Any] = {}
    with Problems() as problems:
        with problems.collecting(ModelFolderError):
            model = _check_model(own)
            for model_check in (_check_adapter, _check_plugin, _check_disk):
                with problems.collecting(ModelFolderError, LearnerError):
                    model_check(own, model)
        for check in (
            lambda: sft_section(config),
            lambda: _check_colossalai(own),
            lambda: _check_folders(own),
            lambda: check_ranks(own.section, own.section.ranks),
            lambda: check_interfaces(own.section),
            launch.check_environment,
            lambda: check_callbacks(own.section.callbacks),
        ):
            with problems.collecting(LearnerError):
                check()
    plan = {"model": str(config.model.path), "plugin": own.section.plugin, "ranks": own.section.ranks}
    if launch.rank() == 0:
        if unused := without_effect(config):
            log.warning(f"without effect in supervised fine-tuning: {', '.join(unused)}")
        if own.section.ranks > 1:
            warn_of_little_shared_memory()
    if config.dry_run:
        data = SftData.read(config, model)
        with Problems() as problems, problems.collecting(LearnerError):
            check_schedule(own.section, data.steps)
        _warn_of_rate(own.section, data.steps)
        _warn_of_idle_keys(own, ("", "lora", "early_stop", "checkpoint"), list(data.evaluation))
        plan |= data.summary()
    return {**plan, "folder": str(config.run.path)}


def checkpoint_root(config: Config) -> Path:
    """Return the folder of the checkpoints."""
    return config.section.checkpoint.folder or config.run.path / "checkpoints"


def evaluation_sets(config: Config) -> list[str]:
    """Return the sets to evaluate: those named, or all of [data.evaluation]."""
    if config.section.evaluation.sets is not None:
        return config.section.evaluation.sets
    return list(config.data.get("evaluation", {}))


def _check_model(config: Config) -> dict[str, Any]:
    """Return the model's config.json."""
    path = config.model.path
    if path is None:
        raise ConfigError("model.path is missing: it names the Hugging Face folder of the model to train")
    return check_model_folder(path, weights=config.weights)


def _check_colossalai(config: Config) -> None:
    if find_spec("colossalai") is None:
        raise ConfigError(
            "ColossalAI is not installed in this environment; install it with: pip install --no-deps colossalai==0.5.0"
        )


def _check_length(config: Config, model: dict[str, Any]) -> None:
    check_completion_length(model, config.run.sampling.max_new_tokens)


def _check_plugin(config: Config, model: dict[str, Any]) -> None:
    if config.section.plugin == "hybrid_parallel":
        check_model(SimpleNamespace(**model), config.section)


def _check_experts(config: Config, model: dict[str, Any]) -> None:
    if config.run.router_replay and not set_number(model, EXPERTS):
        raise no_experts(model.get("model_type", ""))
    if config.section.peak_tflops and set_number(model, EXPERTS):
        raise ConfigError(
            f"trainer.peak_tflops: got {config.section.peak_tflops:g}; a mixture of experts does not use all of its "
            "parameters for each token, so its utilization is not known; allowed: 0"
        )


def _check_adapter(config: Config, model: dict[str, Any]) -> None:
    """Compare lora.target_modules with the names of the model's matrices."""
    lora, path = config.section.lora, config.model.path
    if not lora.r or path is None or not config.weights:
        return
    headers = [read_safetensors_header(file) for file in sorted(path.glob("*.safetensors"))]
    matrices = {name for header in headers for name, tensor in header.items() if len(tensor["shape"]) == 2}
    there = {name.removesuffix(".weight").rpartition(".")[2] for name in matrices} - {"lm_head", "embed_tokens"}
    for target in () if lora.target_modules == "all-linear" else lora.target_modules:
        if target not in there:
            raise ConfigError(
                f"trainer.lora.target_modules: the model has no inner linear layer '{target}'"
                f"{did_you_mean(target, sorted(there))}"
            )


def _check_critic(config: Config, model: dict[str, Any]) -> None:
    critic = config.section.algorithm.value_model()
    if critic is None or critic.model is None:
        return
    vocabulary = check_model_folder(critic.model, CRITIC_KEY).get("vocab_size")
    if vocabulary != model.get("vocab_size"):
        raise ConfigError(
            f"{CRITIC_KEY}: {critic.model} has a vocabulary of {vocabulary}, the policy one of "
            f"{model.get('vocab_size')}; they must have the same tokens"
        )


def _check_reference(config: Config, model: dict[str, Any]) -> None:
    """Check the folder and the tokens of another reference model."""
    if (named := config.section.reference.model) is None or config.model.path is None:
        return
    folder = folder_of(named, REFERENCE_KEY, weights=config.weights and not config.dry_run)
    check_model_folder(folder, REFERENCE_KEY, weights=folder == named)
    check_same_vocabulary(config.model.path, folder, REFERENCE_KEY)


def _check_teachers(config: Config) -> None:
    """Check that a distillation has one teacher: that of the rollouts, or the reference model here."""
    section, teachers = config.section, config.run.teachers
    if teachers and not section.distillation.coefficient:
        raise ConfigError(
            f"run.teachers: got {', '.join(teachers)}, and the trainer does not use them; set "
            "trainer.distillation.coefficient above 0, or leave them out"
        )
    if teachers and section.reference.model and not section.kl_coefficient:
        raise ConfigError(
            f"{REFERENCE_KEY}: got '{section.reference.model}' beside run.teachers, which are the teachers; leave "
            "one of them out"
        )
    if section.distillation.coefficient and not teachers and section.reference.model is None:
        raise ConfigError(
            f"trainer.distillation: there is no teacher; set {REFERENCE_KEY}, or a served one, [run.teachers.NAME]"
        )


def _check_texts(config: Config, model: dict[str, Any]) -> None:
    ptx = config.section.ptx
    if ptx.coefficient and ptx.data is not None and "vocab_size" in model:
        from quartet_trainer.rows import RowReader  # it imports numpy

        path = config.model.path
        assert path is not None, "it has been read"
        RowReader(path, model["vocab_size"], None, config.run).read(ptx.data, "trainer.ptx.data")


def _check_folders(config: Config) -> None:
    run, section = config.run.path, config.section
    with Problems() as problems:
        with problems.collecting():
            for folder in (run, *(run / name for name in ("checkpoints", "evaluations", "tensorboard", "weights"))):
                check_folder("run.folder", folder)
            check_file("run.folder", run / "metrics.jsonl")
        for key, named in (
            ("trainer.checkpoint.folder", section.checkpoint.folder),
            ("trainer.weights.folder", section.weights.folder),
        ):
            if named is not None:
                with problems.collecting():
                    check_folder(key, named)


def _check_store(config: Config) -> None:
    """In a dry run check that this host has the address of the weight group's store. A start needs it later, when the
    model is loaded: a name that is not published yet may be by then."""
    weights = config.section.weights
    if config.dry_run and weights.transport in ("gloo", "nccl") and not weights.interface:
        host = weights.store_host or split_address(config.addresses.trainer)[0]
        check_own_host("trainer.weights.store_host", host)


def _check_disk(config: Config, model: dict[str, Any]) -> None:
    """Compare the free space with the size of a checkpoint: of the newest one, else computed from the model."""
    root, keep = checkpoint_root(config), config.section.checkpoint.keep_last
    there = find_checkpoints(root)
    done = there[-1].step if there else 0
    if config.dry_run and 0 < config.run.max_steps < done:
        raise ConfigError(
            f"run.max_steps: got {config.run.max_steps}, and run '{config.run.id}' has done {done} steps; allowed: "
            f"{done} or more to continue it, or another run.id for a new run"
        )
    size = sum(there[-1].manifest["files"].values()) if there else _checkpoint_bytes(config)
    free = free_bytes(root)
    room = f"trainer.checkpoint: {free / GIB:.1f} GiB are free at '{root}', and a checkpoint takes {size / GIB:.1f} GiB"
    if free < size and not there:
        raise ConfigError(f"{room}; make room, or set trainer.checkpoint.folder")
    # The oldest is removed when the next is complete.
    if free < size * (1 + max(0, keep - len(there))) and launch.rank() == 0:
        log.warning("%s: too little for trainer.checkpoint.keep_last (%d) and one more; make room", room, keep)


def _checkpoint_bytes(config: Config) -> int:
    """Return the size of a checkpoint: weights and AdamW's two moments, in float32 (learner/storage.py); 0 if it is
    not known, or small, as an adapter's is."""
    critic = config.section.algorithm.value_model()
    models = [config.model.path]
    if critic and critic.form == "separate":
        models.append(critic.model or config.model.path)
    if config.section.lora.r or not config.weights:
        return 0
    headers = [read_safetensors_header(file) for model in models if model for file in model.glob("*.safetensors")]
    count = sum(math.prod(tensor["shape"]) for header in headers for tensor in header.values())
    return 3 * count * (8 if config.section.precision == "fp64" else 4)


def _check_mini_batches(config: Config) -> None:
    """Refuse more mini-batches than a step has groups. In an environment each of several agents has its own groups."""
    most, wanted = config.run.groups_per_step, config.section.mini_batches
    if wanted > most and config.run.environment is None:
        raise ConfigError(
            f"trainer.mini_batches: got {wanted}; allowed: at most run.groups_per_step, {most}: each has whole groups"
        )


def _check_sampling(config: Config) -> None:
    """Check the sampling of training prompts: the run's, and that of rows, of which the first with a fault is named."""
    data = {"train": config.data.get("train")}
    found: dict[str, str] = {}
    for n, (where, sampling) in enumerate(
        [("run.sampling", config.run.sampling), *sections_of_rows(data, "sampling", SamplingSection)]
    ):
        for key, fault in _faults(config, sampling, of_row=n > 0):
            place = "run.group_size" if key == "group_size" else f"{where}.{key}"
            found.setdefault(f"{key} {n > 0}", f"{place}: {fault}")
    if found:
        raise ConfigError(*found.values())


def _faults(config: Config, sampling: SamplingSection, of_row: bool) -> Iterator[tuple[str, str]]:
    """Yield the keys with which nothing is learned, and what is allowed."""
    algorithm, run = config.section.algorithm, config.run
    scheduled = run.temperature_schedule is not None and not of_row
    if not scheduled and sampling.temperature < LOWEST_TEMPERATURE:
        yield (
            "temperature",
            f"got {sampling.temperature:g}, at which nothing can be trained; allowed: {LOWEST_TEMPERATURE:g} or above, "
            "such as 1; greedy in [run.evaluation_sampling] only",
        )
    distillation = config.section.distillation
    rewards_count = not distillation.coefficient or distillation.reward_weight > 0
    if rewards_count and algorithm.compares_groups and (sampling.n or (0 if of_row else run.group_size)) == 1:
        yield (
            "n" if sampling.n else "group_size",
            f"got 1; {algorithm.name} compares a prompt's completions, and the advantage of a single one is 0; "
            "allowed: 2 or more, or an algorithm without groups",
        )
    if config.run.teachers:
        taken = altered(sampling, Effect.REMOVES)
        if scheduled or sampling.temperature != 1:
            taken["temperature"] = "a schedule" if scheduled else f"{sampling.temperature:g}"
        for key, value in taken.items():
            yield (
                key,
                f"got {value}; run.teachers judge the model's own distribution; allowed: temperature 1, no filters",
            )
    for key, value in altered(sampling, Effect.CHANGES).items():
        yield (
            key,
            f"got {value}; the rollout's log-probs would not be the model's, and the trainer cannot compute them "
            "again; allowed: in [run.evaluation_sampling] only",
        )


def _check_evaluation_sets(config: Config) -> None:
    """Compare the sets with [data.evaluation]; without [data] they are in the client's run file."""
    known = list(config.data.get("evaluation", {}))
    unknown = [name for name in evaluation_sets(config) if name not in known]
    if config.data and unknown:
        raise ConfigError(
            f"trainer.evaluation.sets: [data.evaluation] has no set '{unknown[0]}'"
            f"{did_you_mean(unknown[0], known) or '; it is empty'}"
        )


def _check_metrics(config: Config) -> None:
    """Check that early_stop.metric and checkpoint.best_metric are metrics of the run's evaluations."""
    sets = evaluation_sets(config)
    known = [name for one in sets for name in _metric_names(config, one)]
    # An environment names its rewards only when it gives them; a table, which `quartet run` expands, is not read here.
    given = tuple(f"eval/{one}/reward/" for one in sets if config.run.environment is not None)
    given += tuple(f"eval/{one}/" for one in sets if isinstance(config.data.get("evaluation", {}).get(one), dict))
    with Problems() as problems:
        for key, name in (
            ("trainer.early_stop.metric", config.section.early_stop.metric),
            ("trainer.checkpoint.best_metric", config.section.checkpoint.best_metric),
        ):
            if name and config.data and name not in known and not name.startswith(given):
                problems.add(f"{key}: no evaluation has '{name}'{did_you_mean(name, known) or '; no set is evaluated'}")


def _metric_names(config: Config, name: str) -> list[str]:
    """Return the names of a set's metrics, by the run's sampling and verifiers and those of its rows."""
    rows = {"evaluation": {name: config.data.get("evaluation", {}).get(name)}}
    run = config.run.evaluation_sampling
    numbers = {run.n if run else 0, *(one.n for _, one in sections_of_rows(rows, "sampling", SamplingSection))}
    theirs = [one.spec_name for _, one in sections_of_rows(rows, "verifiers", VerifierSection)]
    verifiers = [*(one.spec_name for one in config.run.verifiers), *theirs]
    return [each for n in sorted(numbers) for each in metric_names(name, n or 1, verifiers)]


def _warn(config: Config) -> None:
    """Warn about combinations of settings that are allowed but rarely intended."""
    run, settings = config.run, config.section
    cuts = [f"{key} = {value}" for key, value in altered(run.sampling, Effect.REMOVES).items()]
    if cuts and not run.sampling_masks:
        log.warning(
            f"run.sampling: {', '.join(cuts)} without run.sampling_masks biases every importance ratio: the rollout's "
            "log-probs are over the remaining candidates, the trainer's over the whole vocabulary; set "
            "run.sampling_masks = true"
        )
    if run.sampling.n and "group_size" in run.model_fields_set and run.sampling.n != run.group_size:
        log.warning(f"run.group_size: got {run.group_size}, which run.sampling.n ({run.sampling.n}) overrides")
    _warn_of_rate(settings, run.max_steps)
    sets = evaluation_sets(config) if config.data else ["the client's"]
    _warn_of_idle_keys(config, ("", "lora", "ptx", "early_stop", "checkpoint", "dynamic_sampling", "weights"), sets)
    if settings.algorithm.mask_truncated and any(verifier.name == "length" for verifier in run.verifiers):
        log.warning(
            "trainer.algorithm.mask_truncated leaves completions out of the loss that the verifier 'length' penalizes "
            "most, but their rewards count in the mean of their group; with that verifier set it to false"
        )


def _warn_of_idle_keys(config: Config, tables: Sequence[str], sets: Sequence[str]) -> None:
    """Warn of keys that the run file sets in tables of [trainer], or in itself (""), and that another key turns off.

    `sets`: the evaluation sets.
    """
    settings, given = config.section, config.file.section("trainer")
    for off, cure, table, keys in (
        (settings.schedule == "constant", "trainer.schedule", "", {"schedule_steps", "min_learning_rate_ratio"}),
        (not settings.lora.r, "trainer.lora.r", "lora", {"alpha", "use_rslora", "target_modules"}),
        (not settings.ptx.coefficient, "trainer.ptx.coefficient", "ptx", {"data", "sequences_per_step"}),
        (not settings.early_stop.metric, "trainer.early_stop.metric", "early_stop", {"mode", "patience", "min_delta"}),
        (not settings.checkpoint.best_metric, "trainer.checkpoint.best_metric", "checkpoint", {"best_mode"}),
        (not settings.samples_dynamically, "trainer.dynamic_sampling.enabled", "dynamic_sampling", {"max_refills"}),
        (settings.weights.transport != "file", 'trainer.weights.transport = "file"', "weights", {"folder"}),
        (not sets, "an evaluation set", "evaluation", {"interval", "before_training", "at_end"}),
    ):
        values, prefix = (given.get(table, {}), f"trainer.{table}.") if table else (given, "trainer.")
        idle = [prefix + key for key in values if key in keys]
        if off and idle and table in (*tables, "evaluation"):
            log.warning(f"{', '.join(idle)}: without effect; set {cure}, or leave it out")


def _warn_of_rate(settings: TrainerSection, steps: int) -> None:
    if not settings.learning_rate:
        log.warning("trainer.learning_rate: got 0, with which nothing is learned; set it above 0, such as 1e-6")
    if 0 < steps < settings.warmup_steps:  # a schedule that falls is refused
        log.warning(
            f"trainer.warmup_steps: got {settings.warmup_steps}, and the run ends after {steps} steps, before "
            f"trainer.learning_rate is reached; allowed: at most {steps}"
        )
