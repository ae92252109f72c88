"""`quartet sft` as a user starts it: mistakes, rows of several sources, a stop, the end."""

import json
import signal

import pytest
from safetensors import safe_open
from started import write_run_file

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def sft_file(model, tmp_path):
    """A fine-tuning on rows of a function, with a set in JSONL."""
    (tmp_path / "own.py").write_text(
        "def train():\n    for n in range(64):\n        yield {'q': f'1+{n}=?', 'a': {'text': str(1 + n)}, 'n': n}\n"
    )
    rows = "".join(json.dumps({"prompt": f"1+{n}=?", "completion": str(1 + n)}) + "\n" for n in range(64, 80))
    (tmp_path / "heldout.jsonl").write_text(rows)
    tree = {
        "run": {"id": "tuned", "folder": str(tmp_path / "run")},
        "model": {"path": str(model)},
        "sft": {"rows_per_step": 8},
        "sft.data": {"path": f"{tmp_path / 'own.py'}:train"},
        "sft.data.fields": {"prompt": "q", "completion": "a.text"},
        "sft.evaluation": {"heldout": str(tmp_path / "heldout.jsonl")},
        "trainer": {"learning_rate": 1e-3},
        # Of the same file's run, and none of fine-tuning's business:
        "broker": {"redis_url": "redis://nowhere"},
    }
    return write_run_file(tmp_path / "tune.toml", tree)


def words(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def records(folder, kind: str) -> list[dict]:
    read = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record for record in read if record["kind"] == kind]


def test_a_stopped_fine_tuning_goes_on_to_the_end(launch, sft_file, tmp_path):
    settings = words("sft.epochs=500", "trainer.checkpoint.interval=0")
    first = launch(sft_file, *settings, command=("sft",))
    first.wait_for_line("step 0/4000  loss on heldout ", 120)
    first.wait_until(lambda: len(records(tmp_path / "run", "step")) > 5, "some steps", 60)
    first.send_signal(signal.SIGINT)
    assert first.wait(60) == 130, first.said()
    first.assert_gone(within=1.0)
    assert f"it goes on with: quartet sft {sft_file} --set sft.epochs=500" in first.said()
    done = len(records(tmp_path / "run", "step"))
    end = words(f"run.max_steps={done + 5}", "sft.epochs=500")
    second = launch(sft_file, *end, command=("sft",))
    assert second.wait(120) == 0, second.said()
    assert f"tuned is done after {done + 5} steps; its model is {tmp_path / 'run' / 'model'}" in second.said()
    assert [record["step"] for record in records(tmp_path / "run", "step")] == list(range(done + 5))
    losses = [record["eval/heldout/loss"] for record in records(tmp_path / "run", "evaluation")]
    assert len(losses) == 2 and losses[1] < losses[0]
    with safe_open(tmp_path / "run" / "model" / "model.safetensors", "np") as tensors:
        assert len(tensors.keys()) > 5
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()
    names = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert names == {"launcher.log", "trainer.log"}, "no other service, and no Redis"


def test_a_dry_run_counts_and_writes_nothing(launch, sft_file, tmp_path):
    checked = launch(sft_file, *words("trainer.algorithm=dapo"), command=("sft", "--dry-run"))
    assert checked.wait(90) == 0, checked.said()
    warning, _, plan = checked.said().partition("\n")
    assert warning == "warning: without effect in supervised fine-tuning: trainer.algorithm"
    plan = json.loads(plan)
    assert (plan["rows"], plan["steps"], plan["evaluation"]) == (64, 8, {"heldout": 16})
    assert not (tmp_path / "run").exists()


def test_a_dry_run_reports_all_mistakes_and_rows_by_their_source(launch, sft_file, tmp_path):
    mistakes = {
        "sft.evaluation.gone=gone.jsonl": "sft.evaluation.gone: there is no file 'gone.jsonl'",
        "sft.epochs=0": "sft.epochs = 0 goes on until run.max_steps",
        "trainer.early_stop.metric=eval/heldout/acc": "trainer.early_stop.metric: no evaluation has",
        "trainer.checkpoint.best_metric=eval/heldout/loss": 'set trainer.checkpoint.best_mode = "min"',
        "trainer.checkpoint.folder=/dev/null/here": "'/dev/null/here' cannot be written",
        "trainer.callbacks=['wandbb']": "there is no callback 'wandbb'",
        "trainer.lora={r=4, target_modules=['qq_proj']}": "the model has no inner linear layer 'qq_proj'",
        "trainer.interface=eth77": "trainer.interface: this host has no network interface 'eth77'",
    }
    checked = launch(sft_file, *words(*mistakes), command=("sft", "--dry-run"))
    assert checked.wait(90) == 2, checked.said()
    lines = checked.said().splitlines()
    for sentence in filter(None, mistakes.values()):
        assert sum(sentence in line for line in lines) == 1, (sentence, lines)
    checked = launch(sft_file, *words("sft.max_tokens=7"), command=("sft", "--dry-run"))
    assert checked.wait(90) == 2, checked.said()
    first, second = checked.said().splitlines()
    assert f"{tmp_path / 'own.py'}:train, row 10: completion has 8 tokens; the model reads at most 7" in first
    assert f"{tmp_path / 'heldout.jsonl'}, line 1: completion has 9 tokens" in second
