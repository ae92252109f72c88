"""What a run leaves behind: numbers checked by hand."""

import errno
import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from fake_broker import make_group, make_transcript
from quartet.v1 import experience_pb2, reward_pb2

from quartet_common.tensors import Dtype, encode, encode_ragged
from quartet_trainer.batch.decode import ExperienceError, decode_groups
from quartet_trainer.errors import TrainingError
from quartet_trainer.evaluation import evaluation_metrics, write_evaluation
from quartet_trainer.records.journal import Journal, append_rollouts, write_sample
from quartet_trainer.records.step_metrics import batch_metrics


def test_an_evaluation_is_averaged_over_completions_and_solved_over_prompts():
    transcripts = [make_transcript("e/0", 3, [1.0, 0.0]), make_transcript("e/1", 3, [0.0, 0.0])]
    metrics = evaluation_metrics("heldout", transcripts, dead=0)
    assert metrics["eval/heldout/ans_acc"] == 0.25 and metrics["eval/heldout/reward"] == 0.25
    assert metrics["eval/heldout/pass@1"] == 0.25 and metrics["eval/heldout/pass@2"] == 0.5
    assert metrics["eval/heldout/prompts"] == 2 and metrics["eval/heldout/dead"] == 0


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


def test_staleness_counts_from_the_oldest_weights_and_by_token():
    group = make_group("pass-0/0", 4, completions=2)
    tensors = experience_pb2.GroupTensors.FromString(group.tensors)
    rows = [np.array([4, 0, 3, 6, 3, 4]), np.array([6, 0, 4])]  # four tokens each: three of version 4, five of 6
    tensors.version_spans.CopyFrom(encode_ragged(rows, Dtype.DTYPE_INT64))
    metrics = batch_metrics(6, [tensors], [group.header])
    assert metrics["staleness/mean"] == metrics["staleness/max"] == 2.0
    assert metrics["staleness/token_mean"] == pytest.approx(3 * 2 / 8)
    assert metrics["staleness/mixed_ratio"] == 0.5


def test_each_verifiers_mean_reward_is_of_the_completions_that_it_scored():
    def group(names: list[str], rewards: list[list[float]]) -> experience_pb2.GroupTensors:
        made = experience_pb2.GroupTensors.FromString(make_group("pass-0/0", 4, completions=2).tensors)
        made.verifiers[:] = names
        made.verifier_rewards.CopyFrom(encode(np.asarray(rewards, np.float32)))
        return made

    first = group(["own.py:close", "length", "length"], [[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])
    header = make_group("pass-0/0", 4, completions=2).header
    metrics = batch_metrics(4, [first, group(["length"], [[0.0], [0.0]])], [header, header])
    assert metrics["reward/close/mean"] == 0.5 and metrics["reward/length-2/mean"] == 0.5
    assert metrics["reward/length/mean"] == 0.25
    decode_groups([first], 1 << 20)
    first.verifiers.append("one more")
    with pytest.raises(ExperienceError, match=r"group 0: verifier_rewards has shape \[2, 3\]; it must be \[2, 4\]"):
        decode_groups([first], 1 << 20)


def test_what_a_full_disk_does_not_take_for_tensorboard_is_dropped_with_one_warning(tmp_path: Path, caplog):
    journal = Journal(tmp_path, first_step=0, tensorboard=False)
    full, broken = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "Input/output error")
    journal._writer = Mock(add_scalar=Mock(side_effect=full), close=Mock(side_effect=full))
    for step in range(2):
        journal.step(step, {"train/loss": 0.5})
    (warning,) = caplog.messages
    assert warning.startswith("the disk is full: what would be written to") and "tensorboard' is dropped" in warning
    journal.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    journal._writer.add_scalar.side_effect = broken
    with pytest.raises(TrainingError, match="cannot write '.*tensorboard': input/output error; started again"):
        journal.step(3, {"train/loss": 0.5})


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
