"""The answers to a set: their file, which is read again, and their figures."""

import json

import pytest

from quartet_client.errors import InputError
from quartet_client.evaluation import SetResult
from quartet_client.prompts import Prompt

MODEL = {"path": "m"}
PROMPTS = [
    Prompt.parse({"id": f"p{n}", "prompt": f"{n}+1=?", "gt_answer": str(n + 1), "sampling": {"n": 2, "seed": n}})
    for n in range(3)
]


def completion(accuracy, answer="", **more):
    spans = {"version_spans": [[4, 0, 3]], "verifiers": [{"name": "math"}], "tokens": 3, "finish_reason": "stop"}
    return {"text": "a", "reward": accuracy or 0.5, "ans_acc": accuracy, "parsed_answer": answer, **spans, **more}


def result(tmp_path, *answers, prompts=PROMPTS):
    rows = SetResult("held", prompts, MODEL, tmp_path).rows
    records = [
        {"place": place, "model": MODEL, "row": rows[place], "completions": given}
        for place, given in enumerate(answers)
    ]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return SetResult("held", prompts, MODEL, tmp_path)


def test_figures_are_of_the_problems_that_have_a_score(tmp_path):
    right, wrong = completion(1.0, "1"), completion(0.0, "7", finish_reason="length")
    summary = result(tmp_path, [right, wrong], [right, right]).summary()
    assert (summary["problems"], summary["failed"], summary["completions"]) == (3, 1, 4)
    assert {name: one["value"] for name, one in summary["metrics"].items()} == {
        "avg@2": 0.75,
        "pass@1": 0.75,
        "pass@2": 1.0,
        "maj@2": 0.75,
    }
    assert summary["truncated_ratio"] == 0.25 and summary["policy_versions"] == [4]
    assert summary["sampling"] == {"n": 2}, "seeds differ by problem"


def test_answers_that_no_verifier_judged_have_a_reward_and_no_figure(tmp_path):
    summary = result(tmp_path, [completion(None)] * 2).summary()
    assert summary["metrics"] == {} and summary["reward"] == 0.5
    assert result(tmp_path).summary()["reward"] is None, "there is no completion"


def test_evaluation_of_programs_has_no_majority(tmp_path):
    prompts = [one.model_copy(update={"test_program": "assert f()"}) for one in PROMPTS]
    assert "maj@2" not in result(tmp_path, [completion(1.0, "def f(): pass")] * 2, prompts=prompts).summary()["metrics"]


def test_an_incomplete_last_line_is_cut_off_and_another_problem_is_refused(tmp_path):
    result(tmp_path, [completion(1.0)] * 2)
    with (tmp_path / "held.jsonl").open("a") as file:
        file.write('{"place": 1, "mod')
    assert list(SetResult("held", PROMPTS, MODEL, tmp_path).records) == [0]
    assert (tmp_path / "held.jsonl").read_text().endswith("}\n")
    changed = [PROMPTS[0].model_copy(update={"gt_answer": "2"}), *PROMPTS[1:]]
    with pytest.raises(InputError, match=r'another gt_answer: "1"; it is "2" now; give another --out'):
        SetResult("held", changed, MODEL, tmp_path)
    fewer = SetResult("held", PROMPTS[:1], MODEL, tmp_path)
    assert list(fewer.records) == [0] and fewer.summary()["failed"] == 0
