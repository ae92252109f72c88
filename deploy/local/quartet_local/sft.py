"""`quartet sft FILE.toml` on one machine: the trainer alone, supervised like a run's services."""

import asyncio
import json
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from quartet_client.sft import write_lines
from quartet_client.terminal import Terminal, echo
from quartet_common.config import ConfigError, load_config
from quartet_common.run_file import run_file_text
from quartet_common.sft import SftSection
from quartet_local.preflight import Plan, Say, check, with_titles
from quartet_local.run import RUN_FILE, Launch, launched

_LOOK_SECONDS = 0.3  # between looks at metrics.jsonl
_LINE_SECONDS = 5.0  # between lines of steps


def check_sft(path: Path, overrides: Sequence[str], say: Say) -> dict[str, Any]:
    """Check a fine-tuning, rows included, and return what would run. Raises ConfigError, LaunchError, InputError."""
    with tempfile.TemporaryDirectory(prefix="quartet-sft-") as folder:
        plan = _check(path, overrides, Path(folder), say)
    return {key: value for key, value in plan.summaries["trainer"].items() if key not in ("section", "address")}


def sft(path: Path, overrides: Sequence[str] = ()) -> int:
    """Fine-tune by a run file on this machine, or go on with it, and return the exit status.

    0: all steps are done; 1: it failed; 2: bad configuration or rows; 128 + n: signal n (130: Ctrl-C), after a
    checkpoint.
    """

    def make() -> Launch:
        folder = load_config("sft", SftSection, path, overrides).run.path / "rows"
        return Launch(_check(path, overrides, folder, echo), Terminal())

    return launched(make, partial(_run, asked=overrides))


def _check(path: Path, overrides: Sequence[str], folder: Path, say: Say) -> Plan[None]:
    """Check the run file with the trainer; rows of sources other than JSONL are written into `folder` before."""
    settings, titles = write_lines(load_config("sft", SftSection, path, overrides).section, folder)
    try:
        return check(("trainer",), path, [*overrides, *settings], lambda _: None, say, options=("--sft",))
    except ConfigError as error:
        raise ConfigError(*(with_titles(problem, titles) for problem in error.problems)) from error


async def _run(launch: Launch, asked: Sequence[str]) -> int:
    """Show the steps and evaluations, and restart the trainer, until it has done all steps."""
    folder, ended = launch.folder, asyncio.Event()
    records, at = _appended(folder / "metrics.jsonl", 0)
    done = max((record["policy_version"] for record in records), default=0)
    total = launch.plan.summaries["trainer"]["steps"]
    words = [word for override in asked for word in ("--set", override)]

    async def end_was_due(name: str, status: int) -> bool:
        if status == 0:
            ended.set()
        return status == 0

    async def show() -> None:
        nonlocal at, done
        over, last = False, -_LINE_SECONDS
        while not over:
            over = ended.is_set()
            records, at = _appended(folder / "metrics.jsonl", at)
            for record in records:
                done, now = record["policy_version"], asyncio.get_running_loop().time()
                if name := record.get("set"):
                    launch.say(f"step {done}/{total}  loss on {name} {record[f'eval/{name}/loss']:.4f}")
                elif now - last > _LINE_SECONDS or done == total:
                    last = now
                    launch.say(
                        f"step {done}/{total}  epoch {record['train/epoch']:.2f}  loss {record['train/loss']:.4f}  "
                        f"{record['throughput/tokens_per_second']:,.0f} tokens/s"
                    )
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), 0 if over else _LOOK_SECONDS)

    async with launch.services() as supervisor:
        (folder / RUN_FILE).write_text(run_file_text(launch.config.file.tree), encoding="utf-8")
        await supervisor.start("trainer")
        launch.hint = lambda: f"; it goes on with: {shlex.join(['quartet', 'sft', str(launch.config.path), *words])}"
        await supervisor.keep_up_until(asyncio.create_task(show()), end_was_due, lambda: done)
    launch.hint = lambda: ""
    launch.say(f"fine-tuning {launch.config.run.id} is done after {done} steps; its model is {folder}/model")
    return 0


def _appended(file: Path, at: int) -> tuple[list[dict[str, Any]], int]:
    """Return the whole records of a JSONL file from byte `at` on, and where they end; all if it has become shorter."""
    data = file.read_bytes() if file.exists() else b""
    new = data[at if at <= len(data) else 0 : data.rfind(b"\n") + 1]
    return [json.loads(line) for line in new.splitlines()], data.rfind(b"\n") + 1
