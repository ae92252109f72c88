"""`quartet score RUN.toml`, `quartet rescore`: a reward service of their own scores rows, with all that they have."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from launched import ROOT

from quartet_client.data import DataSource, load_prompts

pytestmark = pytest.mark.timeout(300)

REWARDS = """
import re
import numpy
from quartet_reward import Score

def tagged(completion, answer, tolerance=0):
    found = re.search(r"<answer>(-?\\d+)", completion)
    return found is not None and abs(int(found[1]) - int(answer)) <= tolerance

def told(completion, prompt, messages, gt_answer, **columns):
    print("printed by told")
    return Score(numpy.float64(0.5), reason=repr((completion, prompt, messages, gt_answer, sorted(columns.items()))))

def number(completion, gt_answer):
    return float(completion) == float(gt_answer)

def leveled(completion, level): return len(level)
def raises(completion): raise KeyError("level")
"""
CASES = {"inputs": ["2\n"], "outputs": ["4\n"]}
ROWS = [
    {"prompt": "1+1=?", "gt_answer": "2", "answer": 2, "level": [1, {"a": 2}]},
    {"messages": [{"role": "user", "content": "2+3=?"}, {"role": "assistant", "content": "It is "}], "gt_answer": "5"},
    {"prompt": "halve", "gt_answer": "half of 6 is 3 #### 3", "verifiers": ["boxed", {"name": "format", "weight": 2}]},
    {"prompt": "double", "test_cases": CASES, "verifiers": ["code"], "solution": "print(2 * int(input()))"},
]


@pytest.fixture(autouse=True)
def temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def score(launch, tmp_path):
    """Score rows with functions of the file; return the exit status, the rows as JSON, and all that was said."""
    (tmp_path / "reward.py").write_text(REWARDS)

    def scored(rows, functions, *arguments):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        named = ", ".join(json.dumps(f"{tmp_path}/reward.py:{name}") for name in functions)
        file = tmp_path / "score.toml"
        file.write_text(f"[run]\nverifiers = [{named}]\n[data]\ntrain = '{tmp_path}/rows.jsonl'\n")
        launched = launch(file, "--json", *arguments, command=("score",))
        status = launched.wait(120)
        lines = launched.said().splitlines()
        launched.assert_gone(within=1.0)
        return status, [json.loads(line) for line in lines if line.startswith('{"row"')], launched.said()

    return scored


def left(tmp_path: Path) -> list[Path]:
    return list(tmp_path.glob("quartet-score-*"))


def test_a_reference_is_scored_in_the_form_that_the_verifiers_read(score, tmp_path):
    status, (sums, chat, boxed), said = score(ROWS[:3], ["told", "tagged"])
    assert status == 0 and not left(tmp_path)
    assert (sums["row"], sums["reward"], sums["outcome"]) == ("line-1", 1.5, "correct")
    assert [one["reward"] for one in sums["verifiers"]] == [0.5, 1.0] and "<answer>2</answer>" in sums["completion"]
    columns = [("answer", 2), ("level", [1, {"a": 2}])]
    assert sums["verifiers"][0]["reason"] == repr((sums["completion"], "1+1=?", None, "2", columns))
    assert chat["reward"] == 1.5
    assert boxed["reward"] == 12.0 and boxed["completion"].endswith(r"<answer>\boxed{3}</answer>")
    assert said.count("printed by told") == 8, "of two rows in four forms"


def test_given_completions_are_scored_with_all_of_the_row(score, tmp_path):
    status, (chat,), _ = score(ROWS[1:2], ["told"], "--completion", "{gt_answer}, not {nothing}")
    asked = [{"role": "user", "content": "2+3=?"}]
    assert status == 0 and chat["completion"] == "5, not {nothing}" and chat["outcome"] == "unjudged"
    assert chat["reason"] == repr(("It is 5, not {nothing}", "2+3=?", asked, "5", []))
    status, (solved,), _ = score(ROWS[3:], ["told"], "--completion", "```python\n{solution}\n```")
    assert (status, solved["reward"], solved["outcome"]) == (0, 1.0, "correct"), solved
    (tmp_path / "given.jsonl").write_text('"2"\n{"completion": "6"}\n')
    given = ("--completions", tmp_path / "given.jsonl")
    status, two, _ = score([ROWS[0]] * 3, ["number"], *given)
    assert (status, [row["reward"] for row in two]) == (0, [1.0, 0.0]) and not left(tmp_path)


def test_a_function_that_fails_on_another_form_is_named(score):
    status, (row,), said = score(ROWS[:1], ["number"])
    assert (status, row["reward"], row["completion"]) == (0, 1.0, "2")
    assert "warning: line-1: of '<think>" in said and "number' raised ValueError: could not convert" in said


def test_a_verifier_that_fails_is_status_1(score, tmp_path):
    status, (row, lacking), said = score(ROWS[:2], ["leveled"])
    assert (status, row["reward"], lacking["reward"]) == (1, 2.0, None)
    assert "leveled' requires level, which the prompt's row does not have" in lacking["failure"]
    shutil.rmtree(*left(tmp_path))
    status, (row,), said = score(ROWS[:1], ["raises"])
    assert (status, row["reward"]) == (1, None) and "raised KeyError: 'level'" in row["failure"]
    (folder,) = left(tmp_path)
    assert f"the service's log is {folder}/logs/reward.log" in said


@pytest.mark.parametrize(
    ("functions", "arguments", "sentence"),
    [
        (["gone"], [], "reward.py' has no function 'gone'; it has: tagged, told, number, leveled, raises"),
        (["told"], ["--completions", "TMP/short.txt", "--rows", "2"], "short.txt has 1, and there are 2 rows"),
        (
            ["told"],
            ["--completions", "TMP/bad.jsonl"],
            "bad.jsonl, line 1: got [3]; allowed: a JSON text, or an object",
        ),
        (
            ["told"],
            ["--rows", "4"],
            "'line-4' has no gt_answer to score as its completion; give completions: a text in",
        ),
        (["told"], ["--answer", "2"], "RUN.toml goes without --answer"),
    ],
)
def test_what_cannot_be_scored_is_refused(score, tmp_path, functions, arguments, sentence):
    (tmp_path / "short.txt").write_text("one\n")
    (tmp_path / "bad.jsonl").write_text("[3]\n")
    status, rows, said = score(
        ROWS if "4" in arguments else ROWS[:3], functions, *(word.replace("TMP", str(tmp_path)) for word in arguments)
    )
    assert (status, rows) == (2, []) and sentence in said, said
    assert not left(tmp_path)


sys.path.append(str(ROOT / "client" / "tests"))
from test_packs import FUNCTION, ROWS as PACK_ROWS  # noqa: E402, I001

BOXED = ("1+2 is \\boxed{3}.", "It is \\boxed{4}.")
AIME_BOXED = ("So \\boxed{33}.", "So \\boxed{3}.")
ADDS = ("```python\ndef add(a, b):\n    return a + b\n```", "```python\ndef add(a, b):\n    return a - b\n```")
BODIES = ("    return a + b\n", "    return a - b\n")
PRINTS = ("```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(3)\n```")
METHODS = tuple(f"```python\nclass Solution:\n    def add(self, a, b): return a {sign} b\n```" for sign in "+-")
ANSWERS = {
    **dict.fromkeys(("gsm8k", "math-500", "aime25"), [BOXED]),
    "aime24": [AIME_BOXED],
    "humaneval": [ADDS, BODIES],
    "mbpp": [ADDS],
    "livecodebench": [PRINTS],
}


def test_a_packs_verifiers_know_right_answers_from_wrong_ones(launch, tmp_path):
    cases = [(pack, PACK_ROWS[pack], pair) for pack, pairs in ANSWERS.items() for pair in pairs]
    (tmp_path / "stored").mkdir()
    for number, (pack, row, pair) in enumerate([*cases, ("livecodebench", FUNCTION, METHODS)]):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(row))
        (prompt,) = load_prompts(DataSource(pack=pack, path=path))
        record = {
            "row": json.loads(prompt.model_dump_json(exclude_unset=True)),
            "completions": [{"text": text} for text in pair],
        }
        (tmp_path / "stored" / f"{number}-{pack}.jsonl").write_text(json.dumps(record) + "\n")
    rescored = launch(tmp_path / "stored", "--json", command=("rescore",))
    assert rescored.wait(120) == 0, rescored.said()
    results = json.loads(rescored.said()[rescored.said().index("[\n") :])
    found = {}
    for one in results:
        found.setdefault(one["set"], []).append(one["new"]["ans_acc"])
    assert found == dict.fromkeys(found, [1.0, 0.0]) and len(found) == 9, results


def test_a_verifier_that_fails_on_a_stored_completion_changes_no_verdict(launch, tmp_path):
    (tmp_path / "reward.py").write_text("def right(completion): return completion == '3' or int(completion) < 0")
    old = {"reward": 1.0, "ans_acc": 1.0, "outcome": "correct", "reason": ""}
    completions = [{"text": text, **old} for text in ("3", "4", "three")]
    record = {"row": {"prompt": "1+2=?", "gt_answer": "3", "id": "sum"}, "completions": completions}
    (tmp_path / "held.jsonl").write_text(json.dumps(record) + "\n")
    rescored = launch(tmp_path / "held.jsonl", "--verifier", f"{tmp_path}/reward.py:right", command=("rescore",))
    assert rescored.wait(120) == 1, rescored.said()
    lines = [" ".join(line.split()) for line in rescored.said().splitlines()]
    assert "held 3 1 1 1.000 0.500 1.000 0.500" in lines, "accuracies are of those that have both scores"
    assert any(line.startswith("held: sum, completion 1: right -> wrong") for line in lines)
    assert any(line.startswith("held: sum, completion 2: right -> failed: ") and "ValueError" in line for line in lines)
    assert "1 completions have no new score and are in no figure" in lines
