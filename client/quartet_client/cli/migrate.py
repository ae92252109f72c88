"""`quartet migrate-colossalchat`: ColossalChat's command line as a run file (docs/colossalchat.md)."""

import argparse
import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click

from quartet_client.errors import InputError
from quartet_common.presets import TRAINER_PRESETS
from quartet_common.run_file import run_file_text
from quartet_common.text import one_line, visible

# The values of `trainer.preset` that stand for `-a`.
PRESETS = {
    "GRPO": "colossalchat-grpo",
    "DAPO": "colossalchat-dapo",
    "REINFORCE_PPB": "colossalchat-reinforce-ppb",
    "RLOO": "colossalchat-rloo",
}

_MICRO_BATCHES = "trainer.micro_batch_tokens bounds memory; the gradient does not depend on the cut"
# Flags that have no counterpart, and why.
_NOT_NEEDED = {
    ("-ibs", "--inference-batch-size"): "rollouts batch continuously",
    ("-imbs", "--inference-microbatch-size"): "rollouts batch continuously",
    ("-tmbs", "--train-microbatch-size"): _MICRO_BATCHES,
    ("-tMbs", "--train-minibatch-size"): _MICRO_BATCHES,
    ("-ma", "--master-address"): "only with several hosts: torchrun has it",
    ("-mp", "--master-port"): "only with several hosts: torchrun has it",
    ("--ray-dir", "--ray_dir"): "there is no Ray",
    ("-egc", "--eval-generation-config"): "write [run.evaluation_sampling]",
    ("-cv", "--code-verifier", "--code-verifier-api-url"): "the sandbox is part of the reward service",
    ("-cbsl", "--consumer-batch-size-limit", "--data_actor_buffer_size_limit"): (
        "run.max_experience_bytes bounds the memory of what waits"
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"ColossalChat's flags: {message}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: integers from 1")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="rl_example.py", add_help=False, allow_abbrev=False)
    add = parser.add_argument
    add("-m", "--model", required=True)
    add("-d", "--dataset", required=True)
    add("-ed", "--eval-dataset", default="")
    add("-p", "--project", default="GRPO")
    add("-e", "--num-episodes", type=_positive, default=1)
    add("-t", "--num-trainers", type=_positive, default=2)
    add("-i", "--num-inferencer", type=int)
    add("-g", "--num-generations", type=_positive, default=8)
    add("-tbs", "--train-batch-size", type=_positive, default=32)
    add("-tp", "--tensor-parallel-size", type=_positive, default=1)
    add("-pp", "--pipeline-parallel-size", type=_positive, default=1)
    add("-zero", "--zero-stage", type=int, default=0, choices=[0, 1, 2])
    add("-b", "--backend", default="transformers", choices=["transformers", "vllm"])
    add("-temp", "--temperature", type=float, default=1.0)
    add("-topk", "--top-k", type=int)
    add("-topp", "--top-p", type=float, default=1.0)
    add("-s", "--system-prompt", default="")
    add("-mnt", "--max-new-tokens", type=int, default=3584)
    add("-mpt", "--max-prompt-tokens", type=int, default=512)
    add("-ptp", "--producer-tensor-parallel-size", type=int, default=1)
    add("-a", "--algo", default="GRPO", choices=list(PRESETS))
    add("-lr", "--learning-rate", type=float, default=1e-6)
    add("-kl", "--kl-coeff", type=float, default=0.01)
    add("-rt", "--reward-type", default="think_answer_tags", choices=["think_answer_tags", "boxed", "code"])
    add("-ei", "--eval-interval", type=int, default=-1)
    add("-nb", "--n-behind", type=int, default=0)
    add("-si", "--save-interval", type=int, default=100)
    add("-sd", "--save-dir", default="")
    add("-esd", "--eval-save-dir", default="")
    add("-rsd", "--rollout-save-dir", default="")
    for flags in _NOT_NEEDED:
        add(*flags)
    add("--enable_profiling", "--enable-profiling", dest="enable_profiling", action="store_true")
    return parser


@dataclass
class NewRunFile:
    """A run file under construction: sections in order, and comments for its head."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def put(self, section: str, **values: Any) -> None:
        """Add keys to a section; those that are None are left out."""
        self.sections.setdefault(section, {}).update({key: v for key, v in values.items() if v is not None})

    def text(self, head: str) -> str:
        lines = [f"# {one_line(line)}" for line in (head, *self.remarks)]
        return "\n".join([*lines, "", run_file_text(self.sections)])


def migrate(flags: str) -> str:
    """Return the run file that does what ColossalChat does with `flags`, e.g. "-m Qwen -d train.jsonl -a DAPO -g 8".

    Raises:
        InputError: a flag that ColossalChat does not have, a required one that is missing, or an invalid value.
    """
    try:
        words = shlex.split(flags)
    except ValueError as error:
        raise InputError(f"ColossalChat's flags cannot be read: {error}") from error
    while words and not words[0].startswith("-"):
        words = words[1:]  # "python rl_example.py"
    given = _parser().parse_args(words)
    file = NewRunFile()
    model_parallel = given.tensor_parallel_size * given.pipeline_parallel_size
    if given.num_trainers % model_parallel:
        raise InputError(f"-t {given.num_trainers} is no multiple of -tp x -pp = {model_parallel}")
    groups_per_step = given.train_batch_size * (given.num_trainers // model_parallel)
    steps = _steps(Path(given.dataset), given.num_episodes, groups_per_step)
    dapo = given.algo == "DAPO"
    _run(file, given, groups_per_step, dapo)
    if steps is not None:  # its producers anneal toward 0.9 in the first episode
        file.put("run.temperature_schedule", kind="colossalchat", updates=max(1, steps // given.num_episodes))
    file.put("model", path=given.model)
    evaluation = _evaluation_sets(given.eval_dataset)
    file.put("data", train=given.dataset, passes=given.num_episodes, shuffle_seed=42)
    file.put("data.evaluation", **evaluation)
    file.put("launcher", rollouts=given.num_inferencer)
    file.put("rollout", engine=given.backend)
    if given.producer_tensor_parallel_size > 1 and given.backend == "vllm":
        file.put("rollout.vllm", tensor_parallel_size=given.producer_tensor_parallel_size)
    _trainer(file, given, steps, model_parallel)
    file.put(
        "trainer.evaluation",
        sets=list(evaluation) if given.eval_interval > 0 else [],
        interval=max(0, given.eval_interval),
    )
    file.put("trainer.checkpoint", interval=given.save_interval, folder=given.save_dir or None)
    _remarks(file, given, groups_per_step, steps)
    return file.text(f"From ColossalChat: {shlex.join(words)}")


def _run(file: NewRunFile, given: argparse.Namespace, groups_per_step: int, dapo: bool) -> None:
    verifiers: list[dict[str, Any]] = [{"name": given.reward_type}]
    if dapo:
        verifiers.append({"name": "length", "parameters": {"buffer_tokens": min(1024, given.max_new_tokens // 4)}})
    file.put(
        "run",
        id=given.project,
        group_size=given.num_generations,
        groups_per_step=groups_per_step,
        max_staleness=given.n_behind,
        max_prompt_tokens=given.max_prompt_tokens,
        system_prompt=given.system_prompt or None,
        verifiers=verifiers,
    )
    file.put(
        "run.sampling",
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        max_new_tokens=given.max_new_tokens,
    )
    file.put("run.evaluation_sampling", temperature=0.6, max_new_tokens=given.max_new_tokens)


def _trainer(file: NewRunFile, given: argparse.Namespace, steps: int | None, model_parallel: int) -> None:
    plugin = "hybrid_parallel" if model_parallel > 1 else "low_level_zero" if given.zero_stage else "torch_ddp"
    # Written out, so that the file says all that it does.
    preset = TRAINER_PRESETS[PRESETS[given.algo]]
    flags = {
        "learning_rate": given.learning_rate,
        "kl_coefficient": 0.0 if given.algo == "DAPO" else given.kl_coeff,
        "schedule": preset["schedule"] if steps else None,
    }
    file.put(
        "trainer",
        **{**preset, **flags},
        schedule_steps=steps,
        ranks=given.num_trainers,
        plugin=plugin,
        tp_size=given.tensor_parallel_size if given.tensor_parallel_size > 1 else None,
        pp_size=given.pipeline_parallel_size if given.pipeline_parallel_size > 1 else None,
        zero_stage=(1 if given.pipeline_parallel_size > 1 else given.zero_stage) if given.zero_stage else None,
    )
    if given.algo == "DAPO":
        file.put("trainer.dynamic_sampling", accuracy_range=[0.01, 0.99])
    if given.enable_profiling:
        file.put("tracing", file=f"runs/{given.project}/spans.json")


def _remarks(file: NewRunFile, given: argparse.Namespace, groups_per_step: int, steps: int | None) -> None:
    file.remarks.append(
        f"groups_per_step: -tbs {given.train_batch_size} prompts x {groups_per_step // given.train_batch_size} "
        "data-parallel groups"
    )
    if steps is None:
        file.remarks.append(
            f"'{given.dataset}' is not here, so its steps could not be counted: the learning rate is constant. For the "
            'cosine set trainer.schedule = "cosine" and trainer.schedule_steps'
        )
    if given.algo == "DAPO":
        file.remarks.append(
            "DAPO: beside groups of mean accuracy 0 or 1, those whose rewards are all equal are replaced"
        )
        if given.kl_coeff:
            file.remarks.append("-kl is ignored by DAPO, there and here")
    if given.algo == "REINFORCE_PPB":
        file.remarks.append("REINFORCE_PPB: whitening divides by the deviation; there it multiplied by it, by mistake")
    if given.eval_dataset and given.eval_interval <= 0:
        file.remarks.append("-ei is not given: nothing is evaluated, as there; trainer.evaluation.sets would")
    for flag, section in (("eval_save_dir", "evaluations/"), ("rollout_save_dir", "samples/")):
        if getattr(given, flag):
            file.remarks.append(f"--{flag.replace('_', '-')} is not needed: {section} in run.folder")
    if given.zero_stage == 2 and given.pipeline_parallel_size > 1:
        file.remarks.append("-zero 2 is not possible beside -pp, there and here: zero_stage is 1")
    if given.producer_tensor_parallel_size > 1 and given.backend != "vllm":
        file.remarks.append(
            f"-ptp {given.producer_tensor_parallel_size} is for vllm: the transformers engine has one device"
        )
    for flags, why in _NOT_NEEDED.items():
        name = next(flag for flag in flags if flag.startswith("--"))
        if getattr(given, name.removeprefix("--").replace("-", "_")) is not None:
            file.remarks.append(f"{name} is not needed: {why}")


def _steps(dataset: Path, episodes: int, groups_per_step: int) -> int | None:
    """Return the run's optimizer steps, by the lines of the data; None if the file is not here."""
    try:
        with dataset.open("rb") as lines:
            prompts = sum(1 for line in lines if line.strip())
    except OSError:
        return None
    return max(1, prompts * episodes // groups_per_step)


def _evaluation_sets(text: str) -> dict[str, str]:
    """Read `-ed`: a JSON object of names and files, or one file."""
    if not text:
        return {}
    try:
        sets = json.loads(text)
    except ValueError:
        return {Path(text).stem: text}
    if not isinstance(sets, dict) or not all(isinstance(path, str) for path in sets.values()):
        raise InputError(f"-ed takes a JSON object of names and files, got {text}")
    return sets


# FLAGS look like options of this command, which must not parse them; -h, which ColossalChat lacks, is none either.
@click.command(
    "migrate-colossalchat", context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]}
)
@click.argument("flags", nargs=-1, required=True, type=click.UNPROCESSED)
def migrate_colossalchat(flags: tuple[str, ...]) -> int:
    """Print the run file that does what ColossalChat's rl_example.py does with FLAGS, in one argument or as they are.

    Flags that have no counterpart are named in its comments, with the reason.
    """
    click.echo(visible(migrate(flags[0] if len(flags) == 1 else shlex.join(flags))), nl=False)
    return 0
