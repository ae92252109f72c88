"""`quartet init`: a run file and rewards for one's own data, whatever its columns are called."""

import json
import tomllib
from pathlib import Path

import pytest

from quartet_client.cli.main import main
from quartet_client.data import DataSection, RunData
from quartet_common.config import load_config

CHAT = [{"role": "user", "content": "1+1?"}]
SHAPES = [
    ({"question": "1+1?", "answer": "2"}, {"messages": "question", "gt_answer": "answer"}),
    ({"question": "1+1?", "answer": "so #### 2", "level": 3}, {"messages": "question", "gt_answer": "answer"}),
    ({"prompt": "1+1?", "solution": "2"}, {"messages": "prompt", "gt_answer": "solution"}),
    ({"prompt": CHAT, "solution": "2"}, {"messages": "prompt", "gt_answer": "solution"}),
    (
        {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "x"},
        {"messages": "prompt", "gt_answer": "reward_model.ground_truth"},
    ),
    ({"messages": CHAT, "ground_truth": "2"}, {"messages": "messages", "gt_answer": "ground_truth"}),
    ({"problem": "1+1?", "answer": 2}, {"messages": "problem", "gt_answer": "answer"}),
    ({"responses_create_params": {"input": CHAT}, "expected_answer": "2"},
     {"messages": "responses_create_params.input", "gt_answer": "expected_answer"}),
    ({"messages": CHAT, "gt_answer": "2"}, None),
]  # fmt: skip


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    return tmp_path


def write_rows(path: str, *rows: object) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def rewards_of(path: str) -> dict:
    names: dict = {}
    exec(compile(Path(path).read_text(), path, "exec"), names)
    return names


@pytest.mark.parametrize(("row", "fields"), SHAPES, ids=lambda part: json.dumps(part)[:40])
def test_the_columns_of_usual_shapes_are_guessed_and_load(home, row, fields, capsys):
    write_rows("mine/rows.jsonl", row, row)
    assert main(["init", "mine"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "next: quartet run mine/run.toml --dry-run"
    config = load_config("data", DataSection, Path("mine/run.toml"))
    train = config.data["train"]
    assert train == ({"path": "mine/rows.jsonl", "fields": fields} if fields else "mine/rows.jsonl")
    (prompt, _) = RunData.load(config).train
    assert prompt.messages[0].content == "1+1?" and prompt.gt_answer in ("2", "so #### 2")
    assert [each.file for each in config.run.verifiers] == ["mine/rewards.py:correct", "mine/rewards.py:short"]
    rewards = rewards_of("mine/rewards.py")
    assert rewards["correct"]("I think 2", prompt.gt_answer) and not rewards["correct"]("12", prompt.gt_answer)
    assert rewards["short"]("") == 1.0 and 0.0 < rewards["short"]("x" * 99) < 1.0


def test_final_answers_are_found_where_models_write_them(home):
    write_rows("mine/rows.jsonl", SHAPES[0][0])
    assert main(["init", "mine"]) == 0
    final = rewards_of("mine/rewards.py")["final_answer"]
    texts = {"<answer> 7 </answer> 8": "7", r"\boxed{7} of 8": "7", "a\n#### 1,234": "1234", "3 then -2.5": "-2.5"}
    assert {text: final(text) for text in texts} == texts and final("no number\nParis") == "Paris"


def test_what_a_row_lacks_is_not_rewarded_and_programs_run(home):
    write_rows("bare.jsonl", {"prompt": "a"})
    write_rows("tests.jsonl", {"question": "a", "input_output": {"inputs": ["1\n"], "outputs": ["2\n"]}})
    assert main(["init", "bare", "--data", "bare.jsonl"]) == main(["init", "code", "--data", "tests.jsonl"]) == 0
    assert [one.spec_name for one in load_config("data", DataSection, Path("bare/run.toml")).run.verifiers] == [
        "bare/rewards.py:short"
    ]
    code = load_config("data", DataSection, Path("code/run.toml"))
    assert [one.spec_name for one in code.run.verifiers] == ["code", "code/rewards.py:short"]
    assert code.data["train"]["fields"] == {"messages": "question", "test_cases": "input_output"}


def test_held_out_files_beside_the_data_are_evaluated(home):
    for name in ("train", "test", "heldout", "test_results", "latest"):
        write_rows(f"mine/{name}.jsonl", SHAPES[0][0])
    assert main(["init", "mine"]) == 0
    tree = tomllib.loads(Path("mine/run.toml").read_text())
    assert list(tree["data"]["evaluation"]) == ["heldout", "test"] == tree["trainer"]["evaluation"]["sets"]
    for name in ("gsm_train", "gsm_test", "other_test"):
        write_rows(f"{name}.jsonl", SHAPES[0][0])
    assert main(["init", "second", "--data", "gsm_train.jsonl"]) == 0
    assert list(tomllib.loads(Path("second/run.toml").read_text())["data"]["evaluation"]) == ["gsm_test"]


def test_a_model_without_a_chat_template_gets_the_text_and_fits_its_context(home):
    write_rows("mine/rows.jsonl", SHAPES[0][0])
    Path("model").mkdir()
    for name, values in (("config", {"max_position_embeddings": 64}), ("tokenizer", {}), ("tokenizer_config", {})):
        Path(f"model/{name}.json").write_text(json.dumps(values))
    assert main(["init", "mine", "--model", "model"]) == 0
    tree = tomllib.loads(Path("mine/run.toml").read_text())
    assert tree["data"]["train"]["fields"] == {"prompt": "question", "gt_answer": "answer"}
    assert tree["run"]["sampling"]["max_new_tokens"] == 32 and tree["model"]["path"] == "model"


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ([], "--data: 'mine' has no data; name the file of the training prompts"),
        (["a.jsonl", "b.jsonl"], "--data: 'mine' has a.jsonl, b.jsonl; name the file of the training prompts"),
        (["a.csv"], "'mine/a.csv' is a table of comma-separated values; allowed: JSONL"),
        (["a.jsonl", "rewards.py"], "'mine/rewards.py' exists; allowed: a folder without it"),
        (["a.jsonl", "run.toml"], "'mine/run.toml' exists; allowed: a folder without it"),
    ],
)
def test_what_cannot_be_guessed_is_refused_and_nothing_is_written(home, files, sentence, capsys):
    for name in files:
        write_rows(f"mine/{name}", SHAPES[0][0])
    assert main(["init", "mine"]) == 2
    assert sentence in capsys.readouterr().err
    assert sorted(file.name for file in Path("mine").iterdir()) == sorted(files)


def test_columns_that_are_no_prompt_are_named(home, capsys):
    write_rows("mine/a.jsonl", {"foo": 1})
    assert main(["init", "mine"]) == 2
    assert "mine/a.jsonl, line 1: got none of them, but foo; exactly one of" in capsys.readouterr().err
