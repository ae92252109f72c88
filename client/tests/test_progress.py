"""Events folded into a run's progress, and its picture."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich.console import Console

from quartet_client.events import (
    CheckpointSaved,
    EvaluationFinished,
    GroupSample,
    MemberChanged,
    Notice,
    RunEvent,
    RunStateChanged,
    StepFinished,
    WeightsPublished,
)
from quartet_client.models import Completion, Group, Member, Score, VersionSpan
from quartet_client.progress import EvaluationPoint, RunProgress, accuracy_text, read_run
from quartet_client.view import RunView

START = datetime(2026, 11, 20, 12, tzinfo=UTC)
ROLLOUT = Member("rollout-1", "rollout", "127.0.0.1:7103", "active", 2, {"tokens_per_second": 5000.0})


def _fold(progress: RunProgress, *happenings) -> RunProgress:
    for number, what in enumerate(happenings, start=1):
        progress.fold(RunEvent(f"{number}", START + timedelta(seconds=number), what))
    return progress


def _step(step: int, reward: float) -> StepFinished:
    return StepFinished(step, step + 1, {"reward/mean": reward, "reward/ans_acc": reward, "staleness/mean": 1.0})


def _evaluation(version: int, accuracy: float) -> EvaluationFinished:
    return EvaluationFinished("held", version, {"eval/held/ans_acc": accuracy, "eval/held/reward": accuracy})


SAMPLE = Group(
    "demo",
    "pass-0/3",
    "p",
    "2+3=?",
    "train",
    "5",
    (Completion(0, "<think>[bold]2+3=5</think>", "stop", 9, (VersionSpan(2, 0, 9),), Score(1.0, 1, 1, "correct")),),
)


def test_a_whole_run():
    progress = _fold(
        RunProgress("demo", max_steps=2),
        RunStateChanged("active", ""),
        MemberChanged(ROLLOUT, False, "registered"),
        WeightsPublished(0, 1, 1, 1000, 0.03),
        _evaluation(0, 0.1),
        _step(0, 0.2),
        _step(1, 0.4),
        GroupSample(SAMPLE),
        _evaluation(2, 0.9),
        None,  # of a newer broker
        CheckpointSaved(2, "/x"),
        Notice("warning", "slow", "trainer-1"),
        RunStateChanged("succeeded", "all steps done"),
    )
    assert progress.steps_done == 2 and progress.policy_version == 2
    assert [(number, step.metrics["reward/mean"]) for number, step in progress.rows()] == [(0, 0.2), (1, 0.4)]
    assert [(p.policy_version, p.accuracy) for p in progress.points("held")] == [(0, 0.1), (2, 0.9)]
    assert progress.members == {"rollout-1": ROLLOUT}
    assert progress.ended and progress.succeeded and progress.reason == "all steps done"
    assert progress.ended_at - progress.started_at == timedelta(seconds=11)
    assert not _fold(progress, MemberChanged(ROLLOUT, True, "no heartbeat")).members


def test_an_evaluation_of_several_completions_has_pass_and_majority_at_the_largest_k():
    names = {"ans_acc": 0.5, "ans_acc_low": 0.25, "ans_acc_high": 0.75, "judged": 16, "avg@8": 0.5, "pass@4": 0.7}
    metrics = {f"eval/held/{name}": value for name, value in (names | {"pass@8": 0.75, "maj@8": 0.625}).items()}
    point = EvaluationPoint.of("held", 3, metrics | {"eval/other/avg@64": 0.1})
    assert point.quoted == {"pass@8": 0.75, "maj@8": 0.625}
    assert accuracy_text(point) == "50.0% (95%: 25.0% to 75.0%, n = 16), pass@8 75.0%, maj@8 62.5%"
    assert EvaluationPoint.of("held", 3, {"eval/held/ans_acc": 0.5, "eval/held/pass@1": 0.5}).quoted == {}


def test_plain_lines_are_for_programs_and_notices_that_repeat_are_one_with_a_count():
    console = Console(file=None, record=True, width=40)
    dead = [Notice("warning", f"prompt pass-0/{n} was set aside as dead: too long", "broker") for n in range(400)]
    with RunView(RunProgress("demo", max_steps=9), console, plain=True) as view:
        for number, what in enumerate(
            [_step(0, 0.5), Notice("info", "x", ""), Notice("error", "broken [1]", ""), *dead]
        ):
            event = RunEvent(str(number), START, what)
            view.progress.fold(event)
            view.print_event(event)
    first = "warning: prompt pass-0/0 was set aside as dead: too long"
    assert console.export_text().splitlines() == [
        "step 1/9  reward 0.500  accuracy 50.0%  staleness 1.00",
        "error: broken [1]",
        first,
        f"{first} (and 399 more like it)",
    ]


def test_a_repeated_notice_keeps_its_numbers():
    console = Console(file=None, record=True, width=40)
    with RunView(RunProgress("demo"), console, plain=True) as view:
        for number in (7, 8):
            view.print_event(RunEvent(str(number), START, Notice("warning", f"prompt {number}: got 512", "")))
    assert console.export_text().splitlines()[-1] == "warning: prompt 7: got 512 (and 1 more like it)"


def test_a_terminal_that_cannot_redraw_gets_lines():
    for variables, plain in (({"TERM": "xterm"}, False), ({"TERM": "dumb"}, True)):
        assert RunView(RunProgress("demo"), Console(force_terminal=True, _environ=variables)).plain is plain


def test_a_run_is_named_after_its_folder_also_from_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_run(Path()).run_id == tmp_path.name
