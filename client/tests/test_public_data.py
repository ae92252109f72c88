"""Rows in the shapes of public data sets: each loads by the line of docs/data.md, or is refused with the cure."""

import base64
import json
import pickle
import re
import zlib
from pathlib import Path
from uuid import UUID

import pytest

from quartet_client import rows as readers
from quartet_client.data import DataSource, load_prompts
from quartet_client.errors import InputError
from quartet_client.prompts import Prompt

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "What is 1+2?"}]
STDIN, FUNCTION = [("1 2\n", "3\n"), ("5 6\n", "11\n")], [("[1, 2]", "3"), ("[5, 6]", "11")]
ADD = {"inputs": [["1 2", ""], "5 6\n"], "outputs": [["3", ""], "11\n"]}
CASES = [{"input": given, "output": expected} for given, expected in STDIN]
ASSERTS = ["assert add(1, 2) == 3", "assert add(5, 6) == 11"]
PROGRAM = "\n".join(ASSERTS)

VERL = {
    "data_source": "math_dapo",
    "prompt": CHAT,
    "ability": "MATH",
    "reward_model": {"ground_truth": "3", "style": "rule"},
    "extra_info": {"index": "17", "split": "train"},
}
APPS = {"problem_id": 4, "question": "Add two numbers.", "starter_code": "", "difficulty": "interview"}
TACO = {"question": "Add two numbers.", "starter_code": "def add(a, b):", "source": "leetcode", "time_limit": None}
CONTESTS = {
    "name": "7_A. Add",
    "description": "Add two numbers.",
    "public_tests": {"input": ["1 2\n"], "output": ["3\n"]},
    "private_tests": {"input": ["5 6\n"], "output": ["11\n"]},
    "generated_tests": {"input": [], "output": []},
    "time_limit": {"seconds": 2, "nanos": 0},
}
MBPP = {"task_id": 2, "text": "Write add(a, b).", "code": "…", "test_list": ASSERTS, "test_setup_code": ""}
SYNTHETIC = {"problem_id": "vcp_1", "task_type": "verifiable_code", "prompt": "Add two numbers.", "metadata": "{}"}
TYPED = [{**case, "type": "stdin_stdout", "fn_name": None} for case in CASES]
CALLS = [
    {"fn_name": "add", "input": [1, 2], "output": 3, "type": "function_call"},
    {"fn_name": "add", "input": [5, 6], "output": 11, "type": "function_call"},
]
LCB = {
    "question_content": "Add two numbers.",
    "starter_code": "",
    "public_test_cases": json.dumps([{**CASES[0], "testtype": "stdin"}]),
    "private_test_cases": json.dumps([{**CASES[1], "testtype": "stdin"}]),
    "metadata": "{}",
}
LCB_FUNCTION = {
    "question_content": "Add two numbers.",
    "starter_code": "class Solution:\n    def add(self, a, b):",
    "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
    "private_test_cases": base64.b64encode(
        zlib.compress(pickle.dumps(json.dumps([{"input": "5\n6", "output": "11", "testtype": "functional"}])))
    ).decode(),
    "metadata": '{"func_name": "add"}',
}
CODEFORCES = {
    "id": "7/A",
    "description": "Add two numbers.",
    "input_format": "Two numbers.",
    "output_format": None,
    "examples": CASES[:1],
    "official_tests": CASES,
    "generated_checker": None,
}
KODCODE = {
    "style": "instruct",
    "question": "Write add(a, b).",
    "solution": "…",
    "test": f"from solution import add\n\ndef test_add():\n    {ASSERTS[0]}",
    "test_info": [{"function_name": "add", "parameter_list": "(a, b)", "docstring": ""}],
}
EURUS = {**VERL, "ability": "code", "reward_model": {"ground_truth": json.dumps(ADD), "style": "rule"}}


def load(tmp_path: Path, rows: list[dict], fields: dict | None = None) -> list[Prompt]:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return load_prompts(DataSource(path=path, fields=fields or {}), require_reference=True)


def reference(prompt: Prompt) -> object:
    """What the reward service gets: the answer, the test program, or the function under test and its cases."""
    found = prompt.reference()
    cases = [(case.input, case.output) for case in found.test_cases]
    return found.answer or found.test_program or ((found.entry_point, cases) if found.entry_point else cases)


def documented(name: str) -> dict:
    """Return the `fields` of a line of the table."""
    (line,) = re.findall(rf"^\| [^|]*\b{re.escape(name)}\b[^|]*\| `(\{{.*?\}})`", PAGE, re.MULTILINE)
    return json.loads(re.sub(r"(\w+) =", r'"\1":', line))


MAPPED = [
    ("GSM8K", {"question": "1+2?", "answer": "It is <<1+2=3>>3.\n#### 3"}, "It is <<1+2=3>>3.\n#### 3"),
    ("verl", VERL, "3"),
    ("OlympiadBench", {"question": "1+2?", "final_answer": ["3"], "is_multiple_answer": False}, "3"),
    ("APPS", {**APPS, "input_output": json.dumps(ADD)}, [("1 2\n", "3\n"), ("5 6\n", "11\n")]),
    (
        "APPS",
        {**APPS, "input_output": json.dumps({"fn_name": "add", "inputs": [[1, 2], [5, 6]], "outputs": [3, 11]})},
        ("add", FUNCTION),
    ),
    (
        "TACO",
        {**TACO, "input_output": '{"fn_name": "digits", "inputs": [[1], [12]], "outputs": ["1", "12"]}'},
        ("digits", [("[1]", '"1"'), ("[12]", '"12"')]),
    ),
    ("CodeContests", CONTESTS, STDIN),
    ("DeepCoder", {"problem": "Add.", "tests": json.dumps(TYPED)}, STDIN),
    ("DeepCoder", {"problem": "Add.", "tests": json.dumps(CALLS)}, ("add", FUNCTION)),
    (
        "DeepCoder",
        {"problem": "Add.", "tests": json.dumps(
            [{"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}}]
        )},
        ("add", [("1\n2", "3")]),
    ),
    ("MBPP", MBPP, PROGRAM),
    ("MBPP", {**MBPP, "test_setup_code": "import math"}, f"import math\n{PROGRAM}"),
    ("AceCode", {"question": "Write add(a, b).", "test_cases": ASSERTS, "inferences": []}, PROGRAM),
    ("SYNTHETIC-1", {**SYNTHETIC, "verification_info": '{"ground_truth": "3"}'}, "3"),
    ("SYNTHETIC-1", {**SYNTHETIC, "id": 4, "verification_info": {"ground_truth": 3}}, "3"),
]  # fmt: skip


RL_SHAPES = {
    "verl": lambda n: {**VERL, "reward_model": {"ground_truth": str(n), "style": "rule"}, "extra_info": {"index": n}},
    "DAPO-Math": lambda n: {**VERL, "reward_model": {"ground_truth": n, "style": "rule-lighteval/MATH_v2"}},
    "TRL": lambda n: {"prompt": chat(n), "solution": f"It is \\(\\boxed{{{n}}}\\)."},
    "OpenR1-Math": lambda n: {"problem": f"1+{n - 1}?", "answer": str(n), "solution": "…", "uuid": str(UUID(int=n))},
    "Tulu 3": lambda n: {"messages": chat(n), "ground_truth": str(n), "dataset": "gsm8k"},
    "INTELLECT-3": lambda n: {"question": f"1+{n - 1}?", "answer": str(n), "info": json.dumps({"id": n})},
    "INTELLECT-2": lambda n: {**SYNTHETIC, "id": n, "verification_info": json.dumps({"ground_truth": str(n)})},
    "NeMo Gym": lambda n: {
        "responses_create_params": {"input": chat(n), "tools": None},
        "expected_answer": str(n),
        "agent_ref": {"type": "responses_api_agents", "name": "math"},
    },
}


def chat(n: int) -> list[dict]:
    """Return one of the forms of a chat, with the keys that tables add."""
    user = {"role": "user", "content": f"1+{n - 1}?" if n % 3 else [{"type": "text", "text": f"1+{n - 1}?"}]}
    return [{"role": "system", "content": "Think.", "name": None}, user] if n % 2 else [user]


@pytest.mark.parametrize("name", RL_SHAPES)
def test_twenty_rows_of_each_project_load_by_the_line_of_the_docs(tmp_path, name):
    rows = [RL_SHAPES[name](n) for n in range(1, 21)]
    prompts = load(tmp_path, rows, documented(name))
    assert [prompt.messages[-1].role for prompt in prompts] == ["user"] * 20
    assert all(str(n) in prompt.gt_answer for n, prompt in enumerate(prompts, start=1))
    with pytest.raises(InputError) as refused:
        load(tmp_path, rows)
    if name not in ("Tulu 3", "INTELLECT-2"):  # whose text and chat are fields as they stand
        assert f"messages = {json.dumps(documented(name)['messages'])}" in str(refused.value)


@pytest.mark.parametrize(("name", "row", "expected"), MAPPED)
def test_a_row_loads_by_the_line_of_the_docs(tmp_path, name, row, expected):
    (prompt,) = load(tmp_path, [row], documented(name))
    assert reference(prompt) == expected
    assert prompt.messages[-1].role == "user" and prompt.messages[-1].content


@pytest.mark.parametrize(("name", "row", "expected"), MAPPED)
def test_an_unmapped_row_is_refused_with_the_map_that_fits_it(tmp_path, name, row, expected):
    with pytest.raises(InputError) as refused:
        load(tmp_path, [row])
    sentence = str(refused.value)
    assert "\n" not in sentence and "line 1: " in sentence
    proposed = re.search(r"its columns fit with fields = (\{.*\})$", sentence)[1]
    (prompt,) = load(tmp_path, [row], json.loads(re.sub(r"(\w+) = ", r'"\1": ', proposed)))
    assert reference(prompt) == expected


@pytest.mark.parametrize("notation", [json.dumps, repr])
def test_verification_info_is_json_or_python(tmp_path, notation):
    row = {**SYNTHETIC, "verification_info": notation({"language": "python", "test_cases": TYPED})}
    (prompt,) = load(tmp_path, [row], {"messages": "prompt", "test_cases": "verification_info.test_cases"})
    assert reference(prompt) == STDIN


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(0.5, "0.5"), (1e-07, "0.0000001"), (72, "72"), ([0.25], "0.25"), (["x"], "x"), (1e22, "1" + "0" * 22)],
)
def test_an_answer_is_a_number_or_a_list_of_one(answer, expected):
    assert Prompt.parse({"prompt": "?", "gt_answer": answer}).gt_answer == expected


@pytest.mark.parametrize(
    ("row", "fields", "sentence"),
    [
        (LCB, None, "converted by the function for LiveCodeBench in docs/data.md"),
        ({**CODEFORCES, "generated_checker": "print(1)"}, None, "the function for open-r1/codeforces in docs/data.md"),
        (KODCODE, {"messages": "question"}, "the function for KodCode in docs/data.md"),
        (VERL, {"messages": "prompt", "gt_answer": "reward_model.groundtruth"},
         "data.train.fields.gt_answer: TRAIN, line 1 has no column 'reward_model.groundtruth'; did you mean "
         "'reward_model.ground_truth'?"),
        (VERL, {"messages": "prompt", "gt_answer": "reward_model.a.b"}, "there are reward_model.ground_truth, reward_"),
        (VERL, {"messages": "prompt", "gt_answer": "ability.b"}, "'ability' is text, and it is text that is not JSON"),
        (VERL, {"messages": "prompt"},
         "nothing to check completions against; give \"gt_answer\", \"test_cases\" or \"test_program\" (or set "
         "data.require_reference = false); its columns fit with fields = { messages = \"prompt\", gt_answer = "
         "\"reward_model.ground_truth\" }"),
        ({"question": "1+2?", "final_answer": ["3", "4"]}, {"messages": "question", "gt_answer": "final_answer"},
         "\"gt_answer\": got ['3', '4']; a list of 2 answers; one is allowed"),
        ({"question": "Prove it.", "final_answer": None}, {"messages": "question", "gt_answer": "final_answer"},
         "nothing to check completions against"),
        ({"question": "Add.", "tests": LCB_FUNCTION["public_test_cases"]}, {"messages": "question",
         "test_cases": "tests"}, "cases of a function, whose name is missing: give entry_point"),
        ({"question": "Add.", "tests": "1 2 -> 3"}, {"messages": "question", "test_cases": "tests"},
         "\"test_cases\": got '1 2 -> 3'; it is text that is not JSON"),
        ({"prompt": "a", "test_cases": [{"input": "1", "out": "2"}]}, None, 'case 0 has no "output"; it has inp'),
        ({"prompt": "a", "test_cases": {"fn_name": "f", "inputs": ["1", [2]], "outputs": [1, 2]}}, None,
         "some inputs are text, JSON of arguments, and others are values"),
        ({"prompt": "a", "test_cases": [*TYPED, *CALLS]}, None, "cases of several kinds: add, function_call, stdin_"),
        ({"prompt": "a", "test_cases": {"inputs": [[1, 2]], "outputs": ["3"]}}, None, "prints text, or lines of"),
        ({"a": "b", "test_list": [1]}, {"messages": "a", "test_program": ["test_list", "a"]},
         "fields.test_program: TRAIN, line 1: got [1] in one of several columns; text can be joined"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_sentence_with_the_cure(tmp_path, row, fields, sentence):
    with pytest.raises(InputError) as refused:
        load(tmp_path, [row], fields)
    assert "\n" not in str(refused.value)
    assert sentence.replace("TRAIN", str(tmp_path / "train.jsonl")) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("eurus", [VERL, EURUS], ["3", [("1 2\n", "3\n"), ("5 6\n", "11\n")]]),
        ("livecodebench", [LCB, LCB_FUNCTION], [STDIN, ("add", [("1\n2", "3"), ("5\n6", "11")])]),
        ("kodcode", [KODCODE], [f"\n\ndef test_add():\n    {ASSERTS[0]}"]),
        ("codeforces", [CODEFORCES, {**CODEFORCES, "generated_checker": "print(1)"}], [STDIN, STDIN]),
    ],
)
def test_the_functions_of_the_docs_convert_the_rest(tmp_path, monkeypatch, name, rows, expected):
    prompts = load_documented(tmp_path, monkeypatch, name, rows)
    assert [reference(prompt) for prompt in prompts] == expected


def load_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rows: list[dict]) -> list[Prompt]:
    """Load rows by a function of the docs, whose source has them."""
    (source,) = re.findall(r"```python\n(# public_data\.py;.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "public_data.py"
    file.write_text(source, encoding="utf-8")
    named = [(f"row {number}", row) for number, row in enumerate(rows, start=1)]
    monkeypatch.setattr(readers, "_rows_of_dataset", lambda source, key: iter(named))
    monkeypatch.setattr(readers, "_rows_of_lines", lambda path, key: iter(named))
    return load_prompts(f"{file}:{name}", require_reference=True)
