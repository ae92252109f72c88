"""What a run leaves behind: numbers checked by hand."""

import errno
import json
import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from fake_broker import make_group, make_transcript
from quartet.v1 import broker_pb2, experience_pb2, reward_pb2
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from quartet_common.tensors import Dtype, encode_ragged
from quartet_common.verifier_scores import verifier_means
from quartet_trainer.errors import TrainingError
from quartet_trainer.evaluation import evaluation_metrics, metric_names, write_evaluation
from quartet_trainer.outcome import judge
from quartet_trainer.records.journal import Journal, append_rollouts, write_sample
from quartet_trainer.records.step_metrics import batch_metrics, device_metrics


def test_an_evaluation_is_averaged_over_completions_and_solved_over_prompts():
    transcripts = [make_transcript("e/0", 3, [1.0, 0.0]), make_transcript("e/1", 3, [0.0, 0.0])]
    for completion in (one for each in transcripts for one in each.completions):
        completion.score.parsed_answer = str(completion.score.ans_acc)
    metrics = evaluation_metrics("heldout", transcripts, dead=0)
    assert metrics["eval/heldout/ans_acc"] == 0.25 and metrics["eval/heldout/reward"] == 0.25
    assert metrics["eval/heldout/pass@1"] == 0.25 and metrics["eval/heldout/pass@2"] == 0.5
    assert metrics["eval/heldout/prompts"] == 2 and metrics["eval/heldout/dead"] == 0
    named = {name for name in metrics if not name.endswith(("_low", "_high", "/judged"))}
    assert named == set(metric_names("heldout", 2, [])), "those that may choose the best checkpoint"
    assert metrics["eval/heldout/maj@2_low"] < metrics["eval/heldout/maj@2"] < metrics["eval/heldout/maj@2_high"]


def test_records_of_programs_have_no_majority():
    transcript = make_transcript("e/0", 3, [1.0, 0.0])
    transcript.instance.prompt.reference.test_program = "assert f() == 1"
    transcript.completions[0].score.parsed_answer = "def f(): return 1"
    metrics = evaluation_metrics("held", [transcript], dead=0)
    assert "eval/held/pass@2" in metrics and "eval/held/maj@2" not in metrics


def test_an_evaluation_s_accuracy_is_that_of_the_completions_that_were_judged():
    half, none = make_transcript("e/0", 3, [1.0, 0.0]), make_transcript("e/1", 3, [1.0, 1.0])
    for completion in (half.completions[1], *none.completions):
        completion.score.unjudged, completion.score.ans_acc = True, 0.0
    metrics = evaluation_metrics("held", [half, none], dead=0)
    assert metrics["eval/held/ans_acc"] == metrics["eval/held/pass@1"] == metrics["eval/held/judged"] == 1
    assert metrics["eval/held/ans_acc_low"] == pytest.approx(0.2065, abs=1e-4) and metrics["eval/held/reward"] == 0.75
    unjudged = evaluation_metrics("held", [none], dead=0)
    assert unjudged["eval/held/reward"] == 1.0
    assert not [name for name in unjudged if "acc" in name.replace("format_acc", "") or "pass" in name]


def test_an_evaluation_that_lost_prompts_has_counts_only():
    assert evaluation_metrics("heldout", [], dead=2) == {"eval/heldout/prompts": 0.0, "eval/heldout/dead": 2.0}
    left = [make_transcript("e/0", 3, [1.0])]
    assert evaluation_metrics("heldout", left, dead=1) == {"eval/heldout/prompts": 1.0, "eval/heldout/dead": 1.0}


@pytest.mark.parametrize(
    ("outcome", "passed", "results"),
    [("CORRECT", 3, [1, 1, 1]), ("TIMED_OUT", 1, [1, -1]), ("COMPILE_ERROR", 0, [-2])],
)
def test_an_evaluation_of_programs_has_colossalchats_fields(tmp_path: Path, outcome, passed, results):
    transcript = make_transcript("e/0", 7, [1.0])
    transcript.instance.prompt.reference.test_cases.add(input="1", output="2")
    value = reward_pb2.Outcome.Value(f"OUTCOME_{outcome}")
    reports = transcript.completions[0].score.verifiers
    reports.add(name="length", reward=0.1)
    reports.add(name="code", outcome=value, reason="case 2 of 3: no", tests=3, tests_passed=passed)
    line = json.loads(write_evaluation(tmp_path, "heldout", 7, [transcript]).read_text())
    assert (line["prediction"], line["gold"], line["ans_valid"], line["policy_versions"]) == ("answer 0", "8", 1.0, [7])
    assert line["test_cases"] == {"inputs": ["1"], "outputs": ["2"]} and line["test_results"] == results
    assert line["test_metadata"] == {"outcome": outcome.lower(), "reason": "case 2 of 3: no", "tests": 3}


def test_each_source_has_its_share_reward_and_accuracy():
    group = make_group("pass-0/0", 4, completions=2)
    tensors = experience_pb2.GroupTensors.FromString(group.tensors)
    headers = [
        experience_pb2.GroupHeader(source=source, completions=2, unjudged=unjudged, reward_mean=reward, ans_acc=right)
        for source, unjudged, reward, right in (("a", 0, 1, 1), ("a", 0, 0, 0.5), ("a", 2, 0.5, 0), ("b", 2, 0.2, 0))
    ]
    metrics = batch_metrics(6, [tensors] * 4, headers)
    assert {name: value for name, value in metrics.items() if name.startswith("source/")} == {
        "source/a/share": 0.75,
        "source/a/reward": 0.5,
        "source/a/ans_acc": 0.75,
        "source/b/share": 0.25,
        "source/b/reward": pytest.approx(0.2),
    }
    assert not any(name.startswith("source/") for name in batch_metrics(6, [tensors], [group.header]))


def test_the_reason_of_an_end_says_what_the_curriculum_skipped():
    run = broker_pb2.Run(stats=broker_pb2.RunStats(committed=8, dropped=30, skipped=30))
    state, reason = judge("the prompts ended", 4, run, list)
    assert state == broker_pb2.RUN_STATE_SUCCEEDED
    assert reason == "the prompts ended: 4 steps trained, 30 prompts skipped by the curriculum"


def test_staleness_counts_from_the_oldest_weights_and_by_token():
    group = make_group("pass-0/0", 4, completions=2)
    tensors = experience_pb2.GroupTensors.FromString(group.tensors)
    rows = [np.array([4, 0, 3, 6, 3, 4]), np.array([6, 0, 4])]  # four tokens each: three of version 4, five of 6
    tensors.version_spans.CopyFrom(encode_ragged(rows, Dtype.DTYPE_INT64))
    metrics = batch_metrics(6, [tensors], [group.header])
    assert metrics["staleness/mean"] == metrics["staleness/max"] == 2.0
    assert metrics["staleness/token_mean"] == pytest.approx(3 * 2 / 8)
    assert metrics["staleness/mixed_ratio"] == 0.5


def test_each_verifiers_means_are_of_the_completions_that_it_scored_and_judged():
    def header(*means: experience_pb2.VerifierMean) -> experience_pb2.GroupHeader:
        made = make_group("pass-0/0", 4, completions=2).header
        made.verifiers.extend(means)
        return made

    mean, tensors = experience_pb2.VerifierMean, experience_pb2.GroupTensors()
    tensors.ParseFromString(make_group("pass-0/0", 4, completions=2).tensors)
    first = header(mean(name="close", reward=0.5, completions=2, ans_acc=1, judged=1), mean(name="none"))
    second = header(mean(name="close", reward=1.0, completions=6, ans_acc=0.5, judged=3))
    metrics = batch_metrics(4, [tensors, tensors], [first, second])
    assert metrics["reward/close/mean"] == 0.875 and metrics["reward/close/ans_acc"] == 0.625
    assert not [name for name in metrics if "none" in name or name.startswith("reward/") and "close" not in name]


def scored(columns: str, *verifiers: reward_pb2.VerifierScore) -> experience_pb2.GroupTranscript:
    """A group of one completion, with the reference answer 8."""
    transcript = make_transcript("e/0", 7, [1.0])
    transcript.instance.prompt.columns = columns
    transcript.completions[0].score.verifiers.extend(verifiers)
    return transcript


VERIFIER = reward_pb2.VerifierScore


@pytest.mark.parametrize(
    ("columns", "verifiers", "shown"),
    [
        ('{"solution": "5"}', [VERIFIER(name="a.py:f", weight=1, reads=["solution", "tolerance"])], {"solution": "5"}),
        ('{"answer": [1]}', [VERIFIER(name="a.py:f", weight=1, reads=["answer"])], {"answer": "[1]"}),
        ("", [VERIFIER(name="a.py:f", weight=1, reads=["answer"])], {"answer": "8"}),
        ('{"answer": 9}', [VERIFIER(name="exact", weight=1, reads=["gt_answer"])], {"gt_answer": "8"}),
        ('{"b": 1, "c": ""}', [VERIFIER(name="a.py:f", weight=1, reads=["*"])], {"b": "1"}),
        ("", [VERIFIER(name="length", weight=1)], {}),
        ('{"answer": 9}', [VERIFIER(name="exact")], {"gt_answer": "8"}),  # of an earlier reward service
        ("no JSON", [VERIFIER(name="exact", weight=1, reads=["gt_answer"])], {"gt_answer": "8"}),
    ],
)
def test_the_reference_shown_is_what_the_verifiers_read(tmp_path: Path, columns, verifiers, shown):
    transcript = scored(columns, *verifiers)
    text = write_sample(tmp_path, 7, [transcript]).read_text()
    assert [line for line in text.splitlines() if line.startswith("Reference ")] == [
        f"Reference {column}: `{value}`" for column, value in shown.items()
    ]
    append_rollouts(tmp_path / "rollouts.jsonl", 7, [transcript])
    assert json.loads((tmp_path / "rollouts.jsonl").read_text())["scores"][0]["references"] == shown
    gold = json.loads(write_evaluation(tmp_path, "held", 7, [transcript]).read_text())["gold"]
    assert gold == next(iter(shown.values()), "")


def test_an_evaluation_has_each_verifiers_means_which_may_choose_the_best_checkpoint():
    right = VERIFIER(name="a.py:f", reward=2, weight=0.5, outcome=reward_pb2.OUTCOME_CORRECT, ans_acc=1)
    wrong = VERIFIER(name="a.py:f", reward=0, weight=0.5, outcome=reward_pb2.OUTCOME_INCORRECT, ans_acc=0)
    length = VERIFIER(name="length", reward=-1, weight=1, outcome=reward_pb2.OUTCOME_UNJUDGED)
    metrics = evaluation_metrics("held", [scored("", right, length), scored("", wrong, length)], dead=0)
    means = {name.removeprefix("eval/held/"): value for name, value in metrics.items() if "/reward/" in name}
    assert means == {"reward/f/mean": 1, "reward/f/ans_acc": 0.5, "reward/length/mean": -1}
    assert {f"eval/held/{name}" for name in means} <= set(metric_names("held", 1, ["a.py:f", "length"]))
    assert not [name for name in evaluation_metrics("held", [scored("", right)], dead=1) if "/reward/" in name]


def test_what_an_agent_did_is_shown_by_seat_turn_and_conversation(tmp_path: Path):
    transcript = make_transcript("pass-0/0", 7, [1.0])
    completion = transcript.completions[0]
    completion.seat, completion.episode = "black", 2
    for reward in (0.5, None, -1.0):
        completion.turn_infos.add(reward=reward)
    for text in ("one", "two"):
        completion.rows.add(prompt_text="2+3=?", text=text)
    sample = write_sample(tmp_path, 7, [transcript]).read_text()
    assert (
        "### Completion 0, seat black of episode 2: reward 1, correct" in sample and "- turns: 0.5, –, -1\n" in sample
    )
    append_rollouts(tmp_path / "rollouts.jsonl", 7, [transcript])
    (score,) = json.loads((tmp_path / "rollouts.jsonl").read_text())["scores"]
    for line in (score, json.loads(write_evaluation(tmp_path, "held", 7, [transcript]).read_text())):
        assert (line["seat"], line["episode"], line["turn_rewards"]) == ("black", 2, [0.5, None, -1.0])
        assert [each["text"] for each in line["conversations"]] == ["one", "two"]


def test_rewards_by_name_are_averaged_for_each_seat_in_whatever_order_they_came():
    transcript = make_transcript("pass-0/0", 7, [1.0, 0.0, 0.0])
    for completion, seat, names in zip(
        transcript.completions, ("a", "b", "a"), (["won", "fast"], ["won"], ["fast"]), strict=True
    ):
        completion.seat = seat
        for number, name in enumerate(names):
            completion.score.verifiers.add(name=name, reward=number + completion.score.reward, outcome=7)
    means = {each.name: (each.reward, each.completions) for each in verifier_means(transcript.completions)}
    assert means == {"a/won": (1.0, 1), "a/fast": (1.0, 2), "b/won": (0.0, 1)}


def test_what_a_full_disk_does_not_take_for_tensorboard_is_dropped_until_there_is_room(
    tmp_path: Path, caplog, monkeypatch
):
    def fail(number: int):
        monkeypatch.setattr(RecordWriter, "write", Mock(side_effect=OSError(number, os.strerror(number))))

    journal, step = Journal(tmp_path, first_step=0), 0
    fail(errno.ENOSPC)
    while not caplog.messages:  # a thread of TensorBoard's writes
        journal.step(step, {"train/loss": 0.5})
        step += 1
    journal.step(step, {"train/loss": 0.5})
    (warning,) = caplog.messages
    assert warning.startswith("the disk is full: what would be written to") and "tensorboard' is dropped" in warning
    monkeypatch.undo()
    journal.step(step + 1, {"train/loss": 0.5})
    journal.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step + 2
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [step + 1]
    fail(errno.EIO)
    with pytest.raises(TrainingError, match="cannot write '.*tensorboard': input/output error; started again"):
        Journal(tmp_path, first_step=0)


@pytest.mark.parametrize("extra", [{}, {"long": "x" * 200_000}])
def test_resumed_journal_removes_later_records_and_reads_only_the_end(tmp_path: Path, monkeypatch, extra: dict):
    path, steps = tmp_path / "metrics.jsonl", 2000
    journal = Journal(tmp_path, first_step=0, tensorboard=False)
    for step in range(steps):
        journal.step(step, {"train/loss": 0.5} | (extra if step > steps - 4 else {}))
        if step % 100 == 99:
            journal.evaluation("heldout", step + 1, {"eval/heldout/reward": 0.25})
    whole = path.read_text().splitlines(keepends=True)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')
    read = Mock(side_effect=json.loads)
    monkeypatch.setattr("quartet_trainer.records.journal.json.loads", read)
    Journal(tmp_path, first_step=steps - 2, tensorboard=False)
    assert path.read_text().splitlines(keepends=True) == whole[:-3], "two steps and an evaluation are written again"
    assert read.call_count < steps
    Journal(tmp_path, first_step=0, tensorboard=False)
    assert path.read_text() == ""


def test_evaluation_repeated_after_a_restart_replaces_its_own_record_alone(tmp_path: Path):
    journal = Journal(tmp_path, first_step=0, tensorboard=False)
    journal.step(0, {})
    for name in ("one", "other"):
        journal.evaluation(name, 1, {"old": 1.0})
    Journal(tmp_path, first_step=1, tensorboard=False).evaluation("one", 1, {"new": 1.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["kind"], row.get("set"), "new" in row) for row in rows] == [
        ("step", None, False),
        ("evaluation", "other", False),
        ("evaluation", "one", True),
    ]


def test_newest_samples_are_kept(tmp_path: Path):
    for step in (0, 10, 999_999, 1_000_000):
        write_sample(tmp_path, step, [make_transcript("pass-0/1", 2, [1.0])], keep_last=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-999999.md", "step-1000000.md"}
    write_sample(tmp_path, 0, [make_transcript("pass-0/1", 2, [1.0])])
    assert len(list(tmp_path.iterdir())) == 3


def test_every_metric_of_the_learner_has_a_place_in_the_docs():
    from quartet_trainer.learner.metrics import METRICS

    documented = (Path(__file__).parents[4] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, metric in METRICS.items():
        assert f"`{metric.public}`" in documented, name


def test_what_the_policy_wrote_does_not_steer_the_terminal_of_who_reads_it(tmp_path: Path):
    transcript = make_transcript("pass-0/1\n# forged", 2, [1.0])
    transcript.completions[0].text = "```\na\x1b[2J\x9b1A\u202e\nb"
    transcript.completions[0].score.reason = "why\n# forged"
    append_rollouts(tmp_path / "rollouts.jsonl", 0, [transcript])
    written = [tmp_path / "rollouts.jsonl", write_evaluation(tmp_path, "heldout", 7, [transcript])]
    sample = write_sample(tmp_path, 12, [transcript]).read_text()
    assert "````text\n```\na\\u001b[2J\\u009b1A\\u202e\nb\n````" in sample, "the fence is longer than those in the text"
    assert "weights v2[0:3]" in sample and "\n# forged" not in sample
    for path in written:
        assert not set("\x1b\x9b\u202e") & set(path.read_text())
    assert json.loads(written[1].read_text())["prediction"] == transcript.completions[0].text


def test_rollout_log_has_all_completions_on_request(tmp_path: Path):
    transcript = scored("", VERIFIER(name="exact", weight=1))
    transcript.completions.add().CopyFrom(transcript.completions[0])
    transcript.completions[1].text = "another"
    for most in (1, None):
        append_rollouts(tmp_path / "rollouts.jsonl", 3, [transcript], most)
    first, every = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    assert every["rollout"][:1] == first["rollout"] and every["rollout"][1].endswith("another")
    assert len(every["rollout"]) == len(every["scores"]) == 2
    begins = every["scores"][1]["prompt_characters"]
    assert (every["rollout"][1][:begins], every["rollout"][1][begins:]) == (transcript.prompt_text, "another")


def test_utilization_is_six_flops_a_parameter_and_token_over_the_peak():
    learned = {"batch/forward_tokens": 4e6, "time/train_step": 2.0}
    found = device_metrics(learned, parameters=10**9, ranks=4, peak_tflops=100)
    assert found == {"throughput/trained_tokens_per_second_per_device": 5e5, "throughput/mfu": pytest.approx(30.0)}
    assert "throughput/mfu" not in device_metrics(learned, 10**9, 4, peak_tflops=0)
