"""Evaluation packs: rows in the shapes of their data sets become problems; senseless sets and options are refused."""

import base64
import json
import pickle
import time
import zlib
from pathlib import Path

import pytest

from quartet_client.cli.main import main
from quartet_client.data import DataSource, load_prompts
from quartet_client.errors import InputError
from quartet_client.packs import packs

CASES = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]
CALLS = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
CODE = "def add(a, b):\n"
DESCRIBED = f'{CODE}    """Add two numbers."""\n'
AIME = {"id": 60, "problem": "What is 1+2?", "solution": "It is 3.", "answer": "033", "url": "…", "year": "2024"}
LIVE = {"question_title": "Add", "question_content": "Add them.", "question_id": "1873_A", "contest_date": "2023"}
ROWS = {
    "gsm8k": {"question": "What is 1+2?", "answer": "1+2 = <<1+2=3>>3\n#### 3"},
    "math-500": {"problem": "What is 1+2?", "solution": "…", "answer": "3", "level": 2, "unique_id": "test/a/1.json"},
    "aime24": AIME,
    "aime25": {"problem": "What is 1+2?", "answer": "3", "id": "0"},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": DESCRIBED,
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
    },
    "mbpp": {
        "task_id": 11,
        "text": "Write add(a, b).",
        "code": "…",
        "test_list": ["assert add(1, 2) == 3"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "livecodebench": {
        **LIVE,
        "starter_code": "",
        "public_test_cases": json.dumps(CASES),
        "private_test_cases": json.dumps([{**CASES[0], "input": "5 6\n", "output": "11\n"}]),
        "metadata": "{}",
    },
}
FUNCTION = {
    **LIVE,
    "starter_code": f"class Solution:\n    {CODE}",
    "public_test_cases": json.dumps(CALLS),
    "private_test_cases": base64.b64encode(
        zlib.compress(pickle.dumps(json.dumps([{**CALLS[0], "input": "5\n6", "output": "11"}])))
    ).decode(),
    "metadata": '{"func_name": "add"}',
}


def problem(tmp_path: Path, pack: str, row: dict, **keys: object):
    path = tmp_path / f"{pack}.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (prompt,) = load_prompts(DataSource(pack=pack, path=path, **keys), require_reference=True)
    return prompt


@pytest.mark.parametrize("pack", ROWS)
def test_rows_of_a_pack_are_problems_with_its_wording_verifiers_and_sampling(tmp_path, pack):
    prompt = problem(tmp_path, pack, ROWS[pack])
    (turn,) = prompt.messages
    asked = ROWS[pack].get("question", ROWS[pack].get("problem", ROWS[pack].get("text", "add")))
    assert asked.lower() in turn.content.lower() and "{" not in turn.content.replace("\\boxed{}", "")
    assert [one.name for one in prompt.verifiers] == packs()[pack]["verifiers"]
    assert prompt.sampling.n == packs()[pack]["sampling"]["n"] and prompt.sampling.max_new_tokens >= 1024


def test_a_pack_without_its_template_reads_its_rows_all_the_same(tmp_path):
    fields = {"prompt": "prompt", "test_program": "test", "entry_point": "entry_point", "verifiers": "verifiers"}
    prompt = problem(tmp_path, "humaneval", ROWS["humaneval"], template="", fields=fields)
    assert prompt.prompt == DESCRIBED and prompt.verifiers[0].parameters == {"prefix": DESCRIBED}


def test_every_pack_has_rows_here():
    assert list(packs()) == list(ROWS)


def test_what_a_run_file_gives_replaces_the_packs(tmp_path):
    own = {"template": "Q: {question}", "verifiers": ["boxed"], "sampling": {"n": 4}, "system_prompt": "Think."}
    prompt = problem(tmp_path, "gsm8k", ROWS["gsm8k"], **own)
    assert [(turn.role, turn.content) for turn in prompt.messages] == [
        ("system", "Think."),
        ("user", "Q: What is 1+2?"),
    ]
    assert prompt.verifiers[0].name == "boxed" and prompt.sampling.model_dump(exclude_unset=True) == {"n": 4}
    assert DataSource(pack="gsm8k").dataset == "openai/gsm8k" and DataSource(pack="gsm8k").split == "test"


def test_private_tests_are_decoded_without_unpickling(tmp_path):
    prompt = problem(tmp_path, "livecodebench", FUNCTION)
    assert prompt.test_cases.inputs == ["1\n2", "5\n6"] and prompt.reference().entry_point == "add"
    bomb = b"cos\nsystem\n(S'touch /tmp/unpickled'\ntR."
    row = {**FUNCTION, "private_test_cases": base64.b64encode(zlib.compress(bomb)).decode()}
    with pytest.raises(InputError, match="livecodebench"):
        problem(tmp_path, "livecodebench", row)
    assert not Path("/tmp/unpickled").exists()


def test_prompts_of_a_source_keep_what_they_have_themselves(tmp_path):
    row = {"prompt": "1+2=?", "gt_answer": "3", "verifiers": ["exact"], "sampling": {"temperature": 0.5}}
    (tmp_path / "own.jsonl").write_text(
        json.dumps(row) + "\n" + json.dumps({"prompt": "2+2=?", "gt_answer": "4"}) + "\n"
    )
    source = DataSource(path=tmp_path / "own.jsonl", verifiers=["math"], sampling={"n": 8, "temperature": 1.0})
    own, other = load_prompts(source)
    assert (own.verifiers[0].name, own.sampling.n, own.sampling.temperature) == ("exact", 8, 0.5)
    assert (other.verifiers[0].name, other.sampling.n, other.sampling.temperature) == ("math", 8, 1.0)
    assert own.to_proto().sampling.n == 8 and other.to_proto().sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["./none", "gsm9k"], "SET: got 'gsm9k'; allowed: a pack, or PACK=FILE with its rows: gsm8k, math-500, "),
        (["./none", "TMP/held.jsonl", "TMP/held.jsonl"], "SET: two sets are named 'held'"),
        (
            ["./none", "TMP/held.jsonl", "-k", "4"],
            "held/0: got 4 completions at temperature 0, which are equal; set one of both",
        ),
        (["./none", "gsm8k=TMP/held.jsonl"], "template: TMP/held.jsonl, line 1 has no column 'question'"),
        (["./none", "TMP/held.jsonl"], "MODEL: there is no folder 'none'"),
        (
            ["TMP/model", "gsm8k=TMP/gsm8k.jsonl"],
            "MODEL: 'TMP/model' has no chat template, and there are chats; allowed",
        ),
        (["TMP/model", "TMP/held.jsonl", "--hold"], "--hold goes with RUN; got TMP/model; a MODEL has a slash"),
        (["mine", "heldout", "-k", "4"], "-k goes with MODEL; got mine; a MODEL has a slash"),
        (["mine", "heldout", "--temperature", "0"], "--temperature goes with MODEL; got mine"),
        (["mine", "gsm8k", "math-500"], "one SET of a run is evaluated; got 2"),
        (["mine", "gsm8k", "--attach", "--engine", "vllm"], "--engine goes without --attach"),
        (["TMP/run.toml", "heldout"], "got a run file; allowed: MODEL with --config TMP/run.toml"),
        (["TMP/model", "TMP/held.jsonl", "--out", "TMP/old"], "held.jsonl' has answers with another model: "),
        (["TMP/model", "TMP/held.jsonl", "--out", "TMP/bad"], "held.jsonl, line 1: it is no answer of `quartet eval`"),
    ],
)
def test_mistakes_of_an_evaluation_are_refused_before_anything_is_started(tmp_path, capsys, words, sentence):
    (tmp_path / "held.jsonl").write_text('{"prompt": "1+2=?", "gt_answer": "3"}\n')
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps(ROWS["gsm8k"]) + "\n")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    for name, record in {"old": {"place": 0, "model": {}, "row": {}, "completions": []}, "bad": {"place": 0}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "held.jsonl").write_text(json.dumps(record) + "\n")
    began = time.monotonic()
    assert main(["eval", *(word.replace("TMP", str(tmp_path)) for word in words)]) == 2
    assert sentence.replace("TMP", str(tmp_path)) in " ".join(capsys.readouterr().err.split())
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            '{"train_step": 0, "rollout": ["1+2=?3"], "scores": []}\n',
            "it has train_step, rollout, scores; allowed: SET",
        ),
        (
            '{"train_step": 0, "rollout": ["1+2=?3"], "scores": [{"reward": 1.0}]}\n',
            "rollouts.jsonl of a run (with prompt_id in each score)",
        ),
        (
            '{"train_step": 0, "rollout": [], "scores": []}\n'
            '{"train_step": 1, "rollout": ["1+2=?3"], "scores": [{"prompt_id": "line-1"}]}\n',
            "its reference is unknown: 0 problems of data.train are named 'line-1'",
        ),
        (
            '{"prediction": "3", "prompt_id": "line-1"}\n',
            "its reference is unknown: 0 problems of data.evaluation.stored are named 'line-1'",
        ),
        ('{"completions": [], "row": {}}\n', "line 1: got none of them; exactly one of"),
        ("[1]", "is a JSON array"),
    ],
)
def test_what_cannot_be_scored_again_is_refused(tmp_path, capsys, lines, sentence):
    (tmp_path / "stored.jsonl").write_text(lines)
    assert main(["rescore", str(tmp_path / "stored.jsonl"), "--verifier", "math"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_run_without_evaluations_is_not_scored_from_its_metrics(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 0}\n')
    assert main(["rescore", str(tmp_path)]) == 2
    told = f"FOLDER: the run in '{tmp_path}' has no evaluations/; allowed: '{tmp_path}/rollouts.jsonl', or SET.jsonl"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"pack": "gsm9k"}, "there is no pack 'gsm9k'; allowed: gsm8k, math-500"),
        ({"path": "a.jsonl", "sampling": {"n": -1}}, "sampling.n"),
        ({"path": "a.jsonl", "verifiers": [{"nam": "math"}]}, "verifiers"),
        ({"path": "a.jsonl", "samples": 8}, "samples"),
        ({"environment": "a.py:play", "template": "{q}"}, "fields, template and system_prompt are of rows"),
    ],
)
def test_mistakes_of_a_source_are_named(source, sentence):
    with pytest.raises(ValueError, match=sentence.replace("[", r"\[")):
        DataSource(**source)
