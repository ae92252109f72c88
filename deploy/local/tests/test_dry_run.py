"""Mistakes on purpose: `quartet run --dry-run` reports all of them at once, names key, value and cure, starts nothing.

Each table is one dry run. What a section's fields refuse hides what its validators refuse, and both what its service's
checks refuse: those have a table each.
"""

import json
import resource
import shutil
from pathlib import Path

import pytest
from launched import SERVICES

pytestmark = pytest.mark.timeout(300)

KEYS = {
    "run.grup_size=4": "unknown key run.grup_size in --set: did you mean 'group_size'?",
    "run.num_generations=8": "TRL's num_generations is run.group_size here",
    "run.beta=0.1": "TRL's beta is trainer.kl_coefficient here",
    "run.sampling.temperature=hot": "run.sampling.temperature: got 'hot' in --set: input should be a valid number",
    "trainer.lr_scheduler_type=cosine": "TRL's lr_scheduler_type is trainer.schedule here",
    "trainer.loss_type=dapo": "TRL's loss_type is trainer.aggregation here",
    "trainer.save_steps=10": "TRL's save_steps is trainer.checkpoint.interval here",
    "trainer.report_to=wandb": "TRL's report_to is trainer.callbacks here",
    "trainer.push_to_hub=true": "TRL's push_to_hub is not here: the final model is a Hugging Face folder",
    "trainer.gradient_acumulation_steps=4": "TRL's gradient_accumulation_steps is run.groups_per_step here",
    "trainer.clip_ratio_low=0.2": "verl's actor_rollout_ref.actor.clip_ratio_low is trainer.clip_low here",
    "trainer.learning_rat=1": "unknown key trainer.learning_rat in --set: did you mean 'learning_rate'?",
    "trainer.max_new_tokens=9": "trainer.max_new_tokens in --set: did you mean run.sampling.max_new_tokens?",
    "trainer.checkpoint.keep=1": "unknown key trainer.checkpoint.keep in --set: did you mean 'keep_last'?",
    "trainer.zzz=1": "unknown key trainer.zzz in --set; the nearest of",
    "trainer.algorithm=grop": "trainer.algorithm: got 'grop' in --set: there is no such algorithm here",
    "trainer.schedule=sine": "trainer.schedule: got 'sine' in --set: input should be 'constant', 'cosine' or 'linear'",
    "trainer.weights.transport=ncll": "trainer.weights.transport: got 'ncll' in --set: there is no such transport here",
    "rollout.vllm.gpu_memory_utilisation=0.5": "no such engine argument; did you mean gpu_memory_utilization",
    "rollout.transformers.max_prefil_tokens=1": "did you mean 'max_prefill_tokens'?",
    "rollout.kv_cache_limit=2": "rollout.kv_cache_limit: got 2 in --set: input should be less than or equal to 1",
    "reward.worker=2": "unknown key reward.worker in --set: did you mean 'workers'?",
    "reward.sandbox.slot=4": "unknown key reward.sandbox.slot in --set: did you mean 'slots'?",
    "broker.max_run=1": "unknown key broker.max_run in --set: did you mean 'max_runs'?",
    "launcher.rollout=2": "unknown key launcher.rollout in --set: did you mean 'rollouts'?",
    "actor_rollout_ref.rollout.n=8": "verl's actor_rollout_ref.rollout.n is run.group_size here",
    "algorithm.adv_estimator=grpo": "verl's algorithm.adv_estimator is trainer.algorithm here",
}

CONTRADICTIONS = {
    "rollout.engine=sglang": "engine: there is no 'sglang' here; allowed: ",
    "trainer.tp_size=2": "tp_size: 2 needs plugin = \"hybrid_parallel\", not 'torch_ddp'",
    "reward.functions=['gone.py:close']": "reward.functions[0]: ",
    "reward.reward_model.path=/gone": "reward.reward_model.path: ",
    "data.train=gone.jsonl": "cannot read 'gone.jsonl': no such file or directory",
}

NAMED = {
    "run.verifiers=[{name='boxd'}, {name='boxed', parameters={corect_reward=1.0}}]": (
        "run.verifiers[0].name: got 'boxd'; allowed: ",
        "run.verifiers[1].parameters.corect_reward: got 1.0; allowed: parameters of 'boxed'",
    ),
    "run.environment={name='calculater'}": "run.environment.name: this rollout has no environment 'calculater'",
    "run.sampling.temperature=0": "run.sampling.temperature: got 0, at which nothing can be trained",
    "rollout.max_unsettled_completions=1": "rollout.max_unsettled_completions: got 1; it must be at least",
    "trainer.evaluation.sets=['heldout2']": "[data.evaluation] has no set 'heldout2': did you mean 'heldout'?",
    "trainer.early_stop.metric=eval/heldout2/acc": "trainer.early_stop.metric: no evaluation has 'eval/heldout2/acc'",
    "trainer.checkpoint.best_metric=eval/heldout2/pass@9": "trainer.checkpoint.best_metric: no evaluation has",
    "trainer.callbacks=[{name='wandbb'}]": "trainer.callbacks[0].name: there is no callback 'wandbb'; there are: wandb",
    "trainer.lora={r=4, target_modules=['qq_proj']}": "no inner linear layer 'qq_proj': did you mean 'q_proj'?",
    "trainer.schedule=linear": "trainer.schedule: a linear over 3 steps with 5 steps of warm-up has no room",
    "trainer.warmup_steps=5": None,
    "trainer.ptx={coefficient=0.1, data='gone.jsonl'}": "trainer.ptx.data: gone.jsonl cannot be read",
    "trainer.checkpoint.folder=/dev/null/here": "run.folder: '/dev/null/here' cannot be made",
}
"""None: part of another mistake."""

LONG = (
    "train.jsonl, line 9: the prompt has 303 tokens; allowed: at most 248, the model's context of 256 less "
    "run.sampling.max_new_tokens (8)"
)
ROWS = (
    ({"prompt": "1+" * 150 + "1=?"}, LONG),
    ({"prompt": "2", "verifiers": ["mathh"]}, "line 10: verifiers[0].name: got 'mathh'; allowed: "),
    ({"prompt": "3", "environment": "sandbx"}, "line 11: environment.name: this rollout has no environment 'sandbx'"),
    (
        {"messages": [{"role": "assistant", "content": "4"}]},
        "line 12: the model's chat template refuses the roles assistant: only users begin; allowed: a chat it renders",
    ),
)
TEMPLATE = "{% if messages[0].role != 'user' %}{{ raise_exception('only users begin') }}{% endif %}{{ messages }}"


@pytest.fixture
def dry_run(launch, run_file, tmp_path):
    """Return the complaints of a dry run, a line each, after it has left nothing behind."""

    def run(*settings: str) -> list[str]:
        words = [word for setting in settings for word in ("--set", setting)]
        launched = launch(run_file, *words, command=("run", "--dry-run"))
        assert launched.wait(90) == 2, launched.text()
        launched.assert_gone(within=2.0)
        assert not (tmp_path / "run").exists(), "a dry run writes nothing"
        lines = launched.text().splitlines()
        assert all(line.startswith("quartet: ") for line in lines), launched.text()
        return lines

    return run


def assert_each_is_reported_once(lines: list[str], expected: list[str]) -> None:
    assert not [words for words in expected if sum(words in line for line in lines) != 1], "\n".join(lines)
    assert len(lines) == len(expected), "\n".join(lines)


@pytest.mark.parametrize("mistakes", [KEYS, CONTRADICTIONS], ids=["keys", "contradictions"])
def test_every_mistake_in_a_section_is_reported(dry_run, mistakes):
    lines = dry_run(*mistakes)
    assert_each_is_reported_once(lines, list(mistakes.values()))
    assert all(line.count(",") < 12 for line in lines), "a list of all keys is no answer"


def test_every_mistake_in_what_a_section_names_is_reported(dry_run, model, run_file, tmp_path):
    chatty = tmp_path / "chatty"
    shutil.copytree(model, chatty)
    (chatty / "chat_template.jinja").write_text(TEMPLATE)
    with (tmp_path / "train.jsonl").open("a") as train:
        train.writelines(json.dumps({**row, "gt_answer": "1"}) + "\n" for row, _ in ROWS)
    held = f"data.evaluation={{heldout='{tmp_path / 'train.jsonl'}'}}"
    lines = dry_run(f"model.path={chatty}", held, *NAMED)
    expected = [words for one in NAMED.values() if one for words in ((one,) if isinstance(one, str) else one)]
    assert_each_is_reported_once(lines, [*expected, *(words for _, words in ROWS)])


def test_rows_of_a_function_are_checked_by_the_services_as_lines_are(dry_run, tmp_path):
    """A map of columns leaves out what it does not name."""
    source = tmp_path / "data.py"
    rows = [{**row, "gt_answer": "1"} for row, _ in ROWS[:3]]
    source.write_text(f"def train():\n    return {rows!r}\n\nheld = train\n")
    lines = dry_run(
        f"data.train={{path='{source}:train', fields={{prompt='prompt', gt_answer='gt_answer'}}}}",
        f"data.evaluation={{held='{source}:held'}}",
    )
    said = ("train, row 1: the prompt has", "held, row 2: verifiers[0].name", "held, row 3: environment.name")
    assert_each_is_reported_once(lines, [f"{source}:{words}" for words in said])


def cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, "model.path: there is no folder '{}'"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "model.path: '{}' has no tokenizer"),
        (cut_off, "model.path: '{}/model.safetensors' has 1252495 bytes of 1252496; copy it again"),
    ],
    ids=["folder", "tokenizer", "weights"],
)
def test_a_model_that_cannot_be_loaded_is_reported_once(dry_run, model, tmp_path, spoil, words):
    spoiled = tmp_path / "spoiled"
    shutil.copytree(model, spoiled)
    spoil(spoiled)
    assert_each_is_reported_once(dry_run(f"model.path={spoiled}"), [words.format(spoiled)])


def test_a_run_that_would_start_is_printed_in_five_seconds_of_two_processors(launch, run_file, tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    launched = launch(run_file, command=("run", "--dry-run"), checkout=None)  # imports and all, as users have it
    assert launched.wait(120) == 0, launched.text()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"a dry run: {seconds:.1f} s of processor time")
    plan = json.loads(launched.text())
    assert plan["services"] == "started on this machine" and plan["addresses"].keys() == set(SERVICES)
    assert seconds < 2 * 5
    assert not (tmp_path / "run").exists()
