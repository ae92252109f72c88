"""The live picture of a run for a terminal, or a line per step, and the loop that keeps it current."""

import math
import time
from collections.abc import Hashable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quartet_client import progress as metrics
from quartet_client.async_client import AsyncClient
from quartet_client.connection import KINDS, repeatedly, until_first
from quartet_client.errors import QuartetError
from quartet_client.events import EvaluationFinished, Notice, RunEvent, RunStateChanged, StepFinished, state_words
from quartet_client.models import Group as SampleGroup
from quartet_client.models import ServiceStatus
from quartet_client.progress import RunProgress, accuracy_text, by_whom, problem_of, reward_text, starting, work_of
from quartet_client.streams import MAX_INSTANCES
from quartet_client.terminal import Terminal
from quartet_common.text import Repeats, block, encodable, one_line, without_numbers

_STATE_STYLES = {
    "waiting": "yellow",
    "active": "green",
    "succeeded": "bold green",
    "failed": "bold red",
    "cancelled": "yellow",
}
_NOTICE_STYLES = {"warning": "yellow", "error": "red"}
_SAMPLE_LINES = 6
STILL_SECONDS = 5.0
"""After so long without a change of the run's counts a full queue holds it up; while prompts are taken it is usual."""


class RunView:
    """Shows a RunProgress. Use it as a context manager; call `print_event` for each event, `refresh` regularly.

    Args:
        plain: print a line per step, evaluation and notice (repeated ones are counted) instead of a live picture;
            default: if there is no terminal, or one that cannot redraw (TERM=dumb).
    """

    def __init__(self, progress: RunProgress, console: Console | None = None, plain: bool | None = None):
        self.progress = progress
        self.console = console or Terminal()
        live = self.console.is_terminal and not self.console.is_dumb_terminal
        self.plain = not live if plain is None else plain
        self._repeats = Repeats()
        self._shown: dict[Hashable, str] = {}  # the last line of each kind that was printed
        self._starting: dict[str, str] = {}
        self._held: dict[str, str] = {}
        # `refresh` alone draws: a thread of rich would read the progress while it changes.
        self._live = Live(console=self.console, get_renderable=self.render, auto_refresh=False, transient=False)

    def __enter__(self) -> "RunView":
        if not self.plain:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        for kind, times in self._repeats.left():
            self._print(f"{self._shown[kind]} (and {times} more like it)")
        if not self.plain:
            self._live.refresh()
            self._live.stop()

    def print_event(self, event: RunEvent) -> None:
        """Print the line of a folded event, if it has one; above a live picture, errors only."""
        is_error = isinstance(event.what, Notice) and event.what.level == "error"
        line = plain_line(self.progress, event) if self.plain or is_error else ""
        if line and isinstance(event.what, Notice):
            since = self._repeats.count(kind := without_numbers(line))
            if since is not None:
                self._shown[kind] = line
            line = "" if since is None else f"{line} (and {since} more like it)" if since else line
        if line:
            self._print(line)

    def _print(self, line: str) -> None:
        # Programs read these lines too: no styling, no wrapping.
        self.console.print(Text(line), soft_wrap=True)

    def refresh(self) -> None:
        """Redraw the live picture; plain: print what the services load or wait for, and what holds the run up, if that
        has changed."""
        if not self.plain:
            self._live.refresh()
            return
        held = waits(self.progress)
        now = {kind: one_line(f"{kind} {doing}") for kind, doing in starting(self.progress).items()}
        now |= {f"waiting {kind}": one_line(f"waiting: {sentence}") for kind, sentence in held.items()}
        for kind, line in now.items():
            if without_numbers(self._starting.get(kind, "")) != without_numbers(line):
                self._print(line)
        for kind in self._held.keys() - held.keys():
            self._print(f"going on: {kind}")
        self._starting, self._held = now, held

    def render(self) -> RenderableType:
        state = self.progress
        parts = [_header(state), _curve(state), _services(state), _last_step(state)]
        parts += [Text(one_line(f"  {sentence}"), "yellow") for sentence in waits(state).values()]
        if state.samples and state.samples[-1].completions:
            parts.append(_sample(state.samples[-1]))
        if state.notices:
            _, newest = state.notices[-1]
            parts.append(Text(one_line(f"  {newest.text}"), _NOTICE_STYLES.get(newest.level, "dim")))
        return Group(*parts)


def waits(state: RunProgress) -> dict[str, str]:
    """Return sentences by what holds the run up: a service, "queue" or "experience". Empty: it goes on."""
    still = time.monotonic() - state.moved_at > STILL_SECONDS
    known = starting(state)
    shown = {
        kind: service for kind, service in state.services.items() if (kind == "broker" or still) and kind not in known
    }
    found = {} if state.ended else {kind: text for kind, service in shown.items() if (text := problem_of(service))}
    if state.ended or not still or not state.stepped or state.stats is None or state.spec is None:
        return found
    stats, prompts, room = state.stats, state.spec.max_queued_prompts, state.spec.max_experience_bytes
    if stats.queued + max(1, min(MAX_INSTANCES, prompts // 4)) > prompts:
        found["queue"] = (
            f"the broker's queue is full: {stats.queued} prompts wait, and at most {prompts} may "
            "(run.max_queued_prompts); no rollout takes any"
        )
    groups = stats.ready + stats.leased_to_trainer
    mean = stats.experience_bytes / max(1, groups + stats.trained)
    # As the broker's admission limit: no room for one more group of the mean size, and a batch is there.
    if groups >= state.spec.groups_per_step and stats.experience_bytes + mean * (stats.leased + 1) > room:
        found["experience"] = (
            f"the broker is full: {stats.experience_bytes:,} bytes of experience, and at most {room:,} may be "
            "(run.max_experience_bytes); rollouts get no prompts until groups are trained"
        )
    return found


def plain_line(state: RunProgress, event: RunEvent) -> str:
    """Return the line to print for an event; empty if it has none."""
    match event.what:
        case StepFinished() as step:
            of = f"/{state.max_steps}" if state.max_steps else ""
            figures = [f"{name} {value}" for name, value in _figures(state)]
            return one_line("  ".join([f"step {step.step + 1}{of}", *figures]))
        case EvaluationFinished() as evaluation:
            point = state.evaluations[evaluation.evaluation_set][evaluation.policy_version]
            accuracy = accuracy_text(point, ".3f")
            at = f"{evaluation.evaluation_set} at version {evaluation.policy_version}"
            return one_line(
                f"evaluation {at}: {point.incomplete or f'accuracy {accuracy}  reward {reward_text(point)}'}"
            )
        case RunStateChanged() as changed:
            now = f"run {state.run_id} {state_words(changed.state)}"
            return one_line(now + (f": {changed.reason}" if changed.reason else ""))
        case Notice() as notice if notice.level != "info":
            return block(f"{notice.level}: {notice.text}")  # a verifier's traceback has several lines
        case _:
            return ""


def _header(state: RunProgress) -> RenderableType:
    line = Table.grid(expand=True)
    line.add_column(ratio=1)
    line.add_column(justify="right")
    name = Text.assemble(("quartet ", "bold"), (one_line(state.run_id), "bold cyan"))
    if state.model:
        name.append(one_line(f"   {state.model}"), "dim")
    right = Text.assemble((f"{_elapsed(state)}   ", "dim"), (state.state, _STATE_STYLES.get(state.state, "")))
    line.add_row(name, right)
    rows: list[RenderableType] = [line]
    if state.max_steps:
        bar = Table.grid(expand=True, padding=(0, 1, 0, 0))
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_row(
            f"step {state.steps_done}/{state.max_steps}",
            ProgressBar(
                total=state.max_steps,
                completed=min(state.steps_done, state.max_steps),
                complete_style="cyan",
                finished_style="green",
            ),
        )
        rows.append(bar)
    else:
        rows.append(Text(f"step {state.steps_done}"))
    if state.reason:
        rows.append(Text(one_line(state.reason), _STATE_STYLES.get(state.state, "")))
    return Panel(Group(*rows), border_style="dim")


def _curve(state: RunProgress) -> RenderableType:
    """Return the first and the last held-out accuracy; before an evaluation, the training reward."""
    text = Text(overflow="ellipsis")
    known = {name: [point for point in state.points(name) if point.accuracy is not None] for name in state.evaluations}
    rewards = [step.metrics[metrics.REWARD] for _, step in state.rows() if metrics.REWARD in step.metrics]
    if name := next(filter(known.get, known), ""):
        first, last, newest = known[name][0], known[name][-1], state.points(name)[-1]
        text.append(f"accuracy on {one_line(name)}: {first.accuracy:.0%} at version {first.policy_version} → ")
        text.append(accuracy_text(last, ".0%"), "bold")
        text.append(f" at version {last.policy_version}")
        if newest.incomplete:
            text.append(f"; {newest.incomplete} at version {newest.policy_version}", "yellow")
    elif rewards:
        text.append(f"training reward {rewards[0]:.2f} → {rewards[-1]:.2f}")
    else:
        doing = "".join(f"\n{one_line(f'{kind} {what}')}" for kind, what in starting(state).items())
        text = Text(f"no step yet{doing}", "dim", overflow="ellipsis", no_wrap=True)
    return Panel(text, border_style="dim")


def _services(state: RunProgress) -> RenderableType:
    table = Table(expand=True, box=None, pad_edge=False, header_style="dim")
    for heading in ("service", "state", "version", "doing"):
        table.add_column(heading, ratio=1 if heading == "doing" else None, no_wrap=heading != "doing")
    for kind in KINDS:
        members = [member for member in state.members.values() if member.kind == kind]
        service = state.services.get(kind)
        if not members:
            table.add_row(kind, *_state(service))
        for member in members:
            word = Text(member.state, "green" if member.state == "active" else "yellow")
            version = str(member.policy_version) if member.policy_version >= 0 else "none"
            doing = f"waits for {member.waiting_for}" if member.waiting_for else _gauges(member.gauges)
            table.add_row(kind, word, version, _brief(doing or "at work", "dim"))
    return Panel(table, border_style="dim")


def _state(service: ServiceStatus | None) -> tuple[Text, str, Text]:
    """Return the state, version and work of a service without members."""
    if service is None:
        return Text("…", "dim"), "", Text("")
    waits = f"waits for {', '.join(service.waiting_for)}" if service.waiting_for else ""
    if service.health != "serving":
        return Text(service.health.replace("_", " "), "red"), "", _brief(waits or service.error, "red")
    if waits:
        return Text("waiting", "yellow"), "", _brief(waits, "yellow")
    return Text("serving", "green"), "", _brief("; ".join(work_of(service)), "dim")


def _brief(text: str, style: str) -> Text:
    return Text(one_line(text), style, overflow="ellipsis")


def _gauges(gauges) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,.4g}" for name, value in sorted(gauges.items())[:4])


def _last_step(state: RunProgress) -> RenderableType:
    grid = Table.grid(expand=True)
    figures = _figures(state)
    if not figures:
        return Text("  no step yet", "dim")
    for _ in figures:
        grid.add_column(justify="center", ratio=1)
    grid.add_row(*(Text(name, "dim") for name, _ in figures))
    grid.add_row(*(Text(value, "bold") for _, value in figures))
    return grid


def _figures(state: RunProgress) -> list[tuple[str, str]]:
    """Return names and values of the last step's main metrics; accuracy is "–" if no answer was judged."""
    formats = (
        ("reward", metrics.REWARD, "{:.3f}"),
        (f"accuracy{by_whom(state.judges)}", metrics.ACCURACY, "{:.1%}"),
        ("length", metrics.LENGTH, "{:.1f}"),
        ("staleness", metrics.STALENESS, "{:.2f}"),
        ("trained tokens/s", metrics.TOKENS_PER_SECOND, "{:,.0f}"),
        ("trainer idle", metrics.IDLE, "{:.0%}"),
    )
    known = {key: form.format(value) for _, key, form in formats if (value := state.last_metrics.get(key)) is not None}
    if known:
        known.setdefault(metrics.ACCURACY, "–")
    return [(name, known[key]) for name, key, _ in formats if key in known]


def _sample(group: SampleGroup) -> RenderableType:
    completion = group.completions[0]
    text = Text(_cut(group.prompt_text), "dim")
    text.append(_cut(completion.text), "default")
    if completion.score is not None:
        right = completion.score.outcome == "correct"
        verdict = f"\nreward {completion.score.reward:g}  {completion.score.outcome}"
        text.append(verdict, "green" if right else "yellow")
        if completion.score.reason:
            text.append(one_line(f"  {completion.score.reason}"), "dim")
        for line in [f"{column}: {one[:400]}" for column, one in group.references.items()]:
            text.append(f"\n{one_line(line)}", "dim")
        for one in completion.score.verifiers:
            text.append(f"\n{one_line(str(one))}", "dim")
    title = Text(f"sample {group.instance_id}, version {completion.policy_version}")
    return Panel(text, title=title, title_align="left", border_style="dim")


def _cut(text: str) -> str:
    lines = text.splitlines() or [""]
    shown = lines[:_SAMPLE_LINES]
    cut = "\n".join(encodable(line, 400) for line in shown)
    return cut + (" …" if len(lines) > _SAMPLE_LINES else "")


def _elapsed(state: RunProgress) -> str:
    if state.started_at is None:
        return "0:00:00"
    elapsed = (state.ended_at or datetime.now(UTC)) - state.started_at
    return str(timedelta(seconds=max(0, math.floor(elapsed.total_seconds()))))


_DRAW_SECONDS = 0.3
_ASK_SECONDS = 2.0


async def watch_progress(client: AsyncClient, view: RunView) -> None:
    """Keep the progress of the view's run current, and show it, until the run ends.

    Then `view.progress.ended` and `.succeeded` are those of the run.

    Raises:
        QuartetError: there is no such run, or the broker is away for too long.
    """
    progress = view.progress
    progress.fold_run(await client.get_run(progress.run_id))

    async def follow() -> None:
        async for event in client.watch(progress.run_id, progress.last_event_id):
            progress.fold(event)
            view.print_event(event)

    async def draw() -> None:
        view.refresh()

    async def ask_run() -> None:
        # While the broker is away, its own row says so, and the counts are those of its last answer.
        with suppress(QuartetError):
            progress.fold_run(await client.get_run(progress.run_id))

    async def ask_service(kind: str) -> None:
        progress.fold_service(await client.get_service(kind))

    # One task per service: one that does not answer delays none of the others.
    asking = (repeatedly(_ASK_SECONDS, partial(ask_service, kind)) for kind in KINDS)
    await until_first(follow(), repeatedly(_DRAW_SECONDS, draw), repeatedly(_ASK_SECONDS, ask_run), *asking)
