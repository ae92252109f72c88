"""`quartet sweep FILE.toml --set KEY=A,B`: a run for each combination of values, in turn or side by side."""

import asyncio
import hashlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quartet_client.cli.compare import print_comparison
from quartet_client.connection import until_first
from quartet_client.terminal import Terminal
from quartet_common.config import ConfigError, LoadedConfig, load_config
from quartet_common.run_file import Problems, toml_value
from quartet_local import guard
from quartet_local.config import LauncherSection
from quartet_local.preflight import check_run, usable_gpus
from quartet_local.run import Work, launched

_STOP_SECONDS = 15.0  # from SIGTERM to SIGKILL; `quartet run` ends within ten
_LONGEST_LINE = 1 << 20
_LONGEST_ID = 64
_OWN = ("run.id", "run.folder")  # each run of a sweep has its own
_SHARED = (("trainer", "checkpoint", "folder"), ("trainer", "weights", "folder"))  # by all runs, if it is set


class Sweep(Work):
    """The runs of all combinations of overrides KEY=VALUE,VALUE,…; `parallel` at a time share out the GPUs.

    Raises:
        ConfigError: the run file or an override cannot be used, or there are fewer GPUs.
    """

    def __init__(self, path: Path, given: Sequence[str], parallel: int):
        super().__init__(Terminal())
        self.path = path
        self.folder, self.runs = variants(path, given, parallel)
        self.slots = _slots(parallel)
        words = [word for override in given for word in ("--set", override)]
        command = shlex.join(["quartet", "sweep", str(path), *words, "--parallel", str(parallel)])
        self.hint = lambda: f"; the sweep goes on with: {command}"


def sweep(path: Path, given: Sequence[str], parallel: int) -> int:
    """Do the runs of a sweep, print a table of them, and return the exit status.

    0: all runs succeeded; 1: one did not; 2: bad configuration; 128 + n: signal n.
    """
    return launched(lambda: Sweep(path, given, parallel), _run_all)


def check_sweep(path: Path, given: Sequence[str], parallel: int, say: Callable[[str], None]) -> dict[str, list[str]]:
    """Check all runs of a sweep with every service, and return their ids with the overrides of each.

    Raises:
        ConfigError: all errors of all runs.
        LaunchError: a service's check crashed.
    """
    runs = Sweep(path, given, parallel).runs
    with Problems() as problems:
        for overrides in runs.values():
            with problems.collecting():
                check_run(path, overrides, say)
    return runs


def variants(path: Path, given: Sequence[str], parallel: int = 1) -> tuple[Path, dict[str, list[str]]]:
    """Return the folder of a sweep's runs, and their ids with the overrides of each. Raises ConfigError."""
    swept: dict[str, list[str]] = {}
    for override in given:
        key, _, text = override.partition("=")
        values = split_values(text)
        if key in swept or len(set(values)) < len(values) or ("" in values and len(values) > 1):
            raise ConfigError(f"--set {override}: allowed: each key and each value once, KEY=VALUE,VALUE")
        if key in _OWN and len(values) > 1:
            raise ConfigError(f"--set {override}: each run's id is made of its values; allowed: one value")
        swept[key] = values
    runs, root = dict[str, list[str]](), Path("runs")
    for combination in itertools.product(*swept.values()):
        one = dict(zip(swept, combination, strict=True))
        overrides = [f"{key}={value}" for key, value in one.items()]
        config = load_config("launcher", LauncherSection, path, overrides)
        _check_apart(config, parallel)
        run_id = _id_of(config.run.id, {key: value for key, value in one.items() if len(swept[key]) > 1})
        root = config.run.folder or root
        runs[run_id] = [*overrides, f"run.id={toml_value(run_id)}", f"run.folder={toml_value(str(root / run_id))}"]
    return root, runs


def split_values(text: str) -> list[str]:
    """Return the values between commas; a comma within double quotes, brackets or braces belongs to its value."""
    values: list[str] = []
    for part in text.split(","):
        last = values[-1] if values else ""
        if any(last.count(start) > last.count(end) for start, end in ("[]", "{}")) or last.count('"') % 2:
            values[-1] += f",{part}"
        else:
            values.append(part.strip())
    return values


def _id_of(base: str, chosen: Mapping[str, str]) -> str:
    """Return a run's id: NAME-learning_rate-1e-4; of values that do not fit into an id, with a digest of them."""
    parts = [f"{key.rpartition('.')[2]}-{value.strip(chr(34) + chr(39))}" for key, value in chosen.items()]
    whole = "-".join([base, *parts])
    allowed = re.sub(r"[^a-zA-Z0-9._-]+", "-", whole)
    if allowed == whole and len(whole) <= _LONGEST_ID:
        return whole
    digest = hashlib.sha256(repr(sorted(chosen.items())).encode()).hexdigest()[:8]
    return f"{allowed[: _LONGEST_ID - 9]}-{digest}"


def _check_apart(config: LoadedConfig, parallel: int) -> None:
    """Raise ConfigError for what the runs of a sweep would share."""
    for section, table, key in _SHARED:
        values = config.file.section(section).get(table, {})
        if isinstance(values, dict) and key in values:
            name = f"{section}.{table}.{key}"
            raise ConfigError(
                f"{name}: the runs of a sweep would share '{values[key]}'; leave it out: each has its own"
            )
    if parallel > 1 and config.addresses.model_fields_set:
        raise ConfigError("addresses: runs side by side would share them; leave [addresses] out: each has its own")


def _slots(parallel: int) -> list[dict[str, str]]:
    """Return the environment variables of each of the runs at a time. Raises ConfigError if there are too few GPUs."""
    gpus = usable_gpus() if parallel > 1 else []
    if gpus and len(gpus) < parallel:
        raise ConfigError(f"--parallel: got {parallel}; allowed: at most {len(gpus)}, the GPUs of this machine")
    shares = [",".join(str(gpu.index) for gpu in gpus[slot::parallel]) for slot in range(parallel)]
    return [{"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": share} if share else {} for share in shares]


async def _run_all(sweep: Sweep) -> int:
    free: asyncio.Queue[Mapping[str, str]] = asyncio.Queue()
    for slot in sweep.slots:
        free.put_nowait(slot)
    failed: dict[str, str] = {}

    async def run_one(run_id: str) -> None:
        slot = await free.get()
        if reason := await _run(sweep, run_id, slot):
            failed[run_id] = reason
        free.put_nowait(slot)

    async with asyncio.TaskGroup() as group:
        for run_id in sweep.runs:
            group.create_task(run_one(run_id))
    print_comparison([sweep.folder / run_id for run_id in sweep.runs])
    for run_id, reason in failed.items():
        sweep.say(f"{run_id} failed: {reason}")
    return 1 if failed else 0


async def _run(sweep: Sweep, run_id: str, slot: Mapping[str, str]) -> str:
    """Do a run, and print its lines; return why it failed, or "". When cancelled, stop it."""
    settings = [word for override in sweep.runs[run_id] for word in ("--set", override)]
    words = ["run", str(sweep.path), *settings, "--plain"]
    sweep.say(f"{run_id}: {shlex.join(['quartet', *words])}")
    process = await asyncio.create_subprocess_exec(
        *guard.guarded([sys.executable, "-m", "quartet_client", *words], _STOP_SECONDS),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=_LONGEST_LINE,
        start_new_session=True,  # Ctrl-C reaches it once, from here
        env={**os.environ, **slot},
    )
    assert process.stdout is not None
    last = "it said nothing"
    try:
        async for line in process.stdout:
            last = line.decode(errors="replace").rstrip() or last
            sweep.say(f"{run_id}: {last}")
        return last.removeprefix("quartet: ") if await process.wait() else ""
    finally:
        if process.returncode is None:
            process.terminate()
            await until_first(process.communicate(), sweep.hurry.wait())
        if process.returncode is None:
            process.terminate()  # the guard kills at the second one
            await process.communicate()
