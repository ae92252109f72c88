"""What an evaluation came to: its metrics, and a JSONL with a line per completion in ColossalChat's fields."""

import json
from collections.abc import Sequence
from math import comb
from pathlib import Path

from quartet.v1 import experience_pb2, reward_pb2

from quartet_common.proportions import proportion
from quartet_common.text import visible
from quartet_trainer.records.samples import outcome_name

# A completion counts as solved from this answer accuracy on.
SOLVED = 0.5

_TEST_RESULTS = {
    reward_pb2.OUTCOME_INCORRECT: 0,
    reward_pb2.OUTCOME_MALFORMED: -2,
    reward_pb2.OUTCOME_COMPILE_ERROR: -2,
}


def evaluation_metrics(name: str, transcripts: Sequence[experience_pb2.GroupTranscript], dead: int) -> dict[str, float]:
    """Return `eval/{name}/…`: means over completions, and pass@k over prompts; accuracy where answers were judged.

    Of an evaluation that lost prompts there is no figure: those that are left may be the easy ones, or the hard ones.
    """
    completions = [completion for transcript in transcripts for completion in transcript.completions]
    prefix = f"eval/{name}"
    metrics = {f"{prefix}/prompts": float(len(transcripts)), f"{prefix}/dead": float(dead)}
    if dead or not completions:
        return metrics
    count = len(completions)
    metrics |= {
        f"{prefix}/reward": sum(c.score.reward for c in completions) / count,
        f"{prefix}/format_acc": sum(c.score.format_acc for c in completions) / count,
        f"{prefix}/response_length": sum(c.tokens for c in completions) / count,
        f"{prefix}/truncated_ratio": sum(c.finish_reason == experience_pb2.FINISH_REASON_LENGTH for c in completions)
        / count,
    }
    judged = [[c.score.ans_acc for c in transcript.completions if not c.score.unjudged] for transcript in transcripts]
    judged = [accuracies for accuracies in judged if accuracies]
    accuracy = proportion([(len(accuracies), sum(accuracies) / len(accuracies)) for accuracies in judged])
    if accuracy is None:
        return metrics
    metrics |= {
        f"{prefix}/ans_acc": accuracy.value,
        f"{prefix}/ans_acc_low": accuracy.low,
        f"{prefix}/ans_acc_high": accuracy.high,
        f"{prefix}/judged": float(accuracy.judged),
    }
    solved = [(len(accuracies), sum(accuracy >= SOLVED for accuracy in accuracies)) for accuracies in judged]
    for k in sorted({1, min(n for n, _ in solved)}):
        metrics[f"{prefix}/pass@{k}"] = sum(pass_at_k(n, right, k) for n, right in solved) / len(solved)
    return metrics


def metric_names(sets: Sequence[str], completions: int) -> list[str]:
    """Return the names that `evaluation_metrics` gives to evaluations of these sets.

    Args:
        completions: of each prompt.
    """
    parts = ("ans_acc", "reward", "format_acc", "response_length", "truncated_ratio", "prompts", "dead", "pass@1")
    return [f"eval/{name}/{part}" for name in sets for part in dict.fromkeys((*parts, f"pass@{completions}"))]


def pass_at_k(n: int, right: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k is right) from `right` of n (Chen et al. 2021, HumanEval)."""
    return 1.0 - comb(n - right, k) / comb(n, k)


def write_evaluation(folder: Path, name: str, step: int, transcripts: Sequence[experience_pb2.GroupTranscript]) -> Path:
    """Write `folder`/{name}-step-{step}.jsonl and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-step-{step}.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for transcript in transcripts:
            for completion in transcript.completions:
                file.write(visible(json.dumps(_line(transcript, completion), ensure_ascii=False)) + "\n")
    return path


def _line(transcript: experience_pb2.GroupTranscript, completion: experience_pb2.CompletionInfo) -> dict[str, object]:
    reference, score = transcript.instance.prompt.reference, completion.score
    line: dict[str, object] = {
        "prompt": transcript.prompt_text,
        "prediction": completion.text,
        "gold": reference.answer,
        "parsed": score.parsed_answer,
        "format_valid": score.format_acc,
        "ans_valid": None if score.unjudged else score.ans_acc,
        "response_length": completion.tokens,
        "reward": score.reward,
        "outcome": outcome_name(score.outcome),
        "reason": score.reason,
        "prompt_id": transcript.instance.prompt.prompt_id,
        "policy_versions": sorted({span.policy_version for span in completion.version_spans}),
    }
    if reference.test_cases:
        line["test_cases"] = {
            "inputs": [case.input for case in reference.test_cases],
            "outputs": [case.output for case in reference.test_cases],
        }
        line["test_results"], line["test_metadata"] = _tests(score)
    return line


def _tests(score: reward_pb2.Score) -> tuple[list[int] | None, dict[str, object]]:
    """Return ColossalChat's list of test results, and what there is to say about them.

    The results are those up to the first that is not right: 1 right, 0 wrong, -1 an error or a limit, -2 not compiled.
    None where the verifier does not know how many were right before it.
    """
    tested = next((verifier for verifier in score.verifiers if verifier.tests), None)
    if tested is None:
        return None, {}
    metadata = {"outcome": outcome_name(tested.outcome), "reason": tested.reason, "tests": tested.tests}
    if not tested.HasField("tests_passed"):
        return None, metadata
    last = [] if tested.outcome == reward_pb2.OUTCOME_CORRECT else [_TEST_RESULTS.get(tested.outcome, -1)]
    return [1] * tested.tests_passed + last, metadata
