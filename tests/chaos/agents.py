"""The agents form of `make chaos`: a `quartet run` whose completions an agent plays, under signals.

A share of the tasks, drawn from the seed, is played badly once: the agent blocks its process, never answers, ignores
its cancellation, raises, or exits. Meanwhile signals hit the environment service, its worker processes, the rollout,
vLLM's engine and Redis. A reward says which tokens were sampled, so that a number made of a failure is found: the
trainer's batches, as a callback writes them, are compared with what the agent returned.
"""

import asyncio
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from signals import END_SECONDS, READY_SECONDS, Report, draw, end_prompts, strike

from launched import SERVICES, Launched, preloaded_checkout  # isort: skip (its path is added by `signals`)
from preloaded import Pythons, make_models  # isort: skip
from started import write_demo_run  # isort: skip

from quartet_client import QuartetError
from quartet_common.ports import free_ports

HERE = Path(__file__).resolve().parent
RUN, GROUP_SIZE, TASKS = "agents", 2, 4000
TARGETS = {
    "environment": "-m quartet_environment ",
    "environment worker": "-m quartet_environment.player ",
    "rollout": "-m quartet_rollout ",
    "engine": " EngineCore ",  # the fork's name
    "redis": "redis-server",
}
FATES = ("block", "wait", "deaf", "raise", "exit")
FATED = 0.08  # share of the tasks
HANG_SECONDS, DEADLINE_SECONDS = 1.0, 10.0
# Until an episode is over: its process has ended, or its agent. A service that is stopped ends nothing for 5 s, and a
# process that an episode goes on in has until the end of the others in it.
GRACE_SECONDS = 20.0
LONGEST = {"block": HANG_SECONDS, "deaf": 2 * DEADLINE_SECONDS}


@dataclass
class AgentsReport(Report):
    """Of a run of agents: how long episodes took by their fate, and what became of them."""

    longest: dict[str, float] = field(default_factory=dict)
    """Seconds until an episode was over, by fate; "": none."""
    met: Counter[str] = field(default_factory=Counter)
    """Episodes that met their fate."""
    returned: int = 0
    trained: int = 0
    """Groups in the trainer's batches, each once."""

    def line(self) -> str:
        fates = ", ".join(f"{fate or 'others'} {self.longest[fate]:.1f} s" for fate in sorted(self.longest))
        return (
            f"{super().line()}\n  {self.trained} groups in batches, {self.returned} episodes with a reward, failures "
            f"{dict(self.met)}; over after at most: {fates}"
        )


class Watch:
    """Follows the agent's log: which episodes are not over, and since when."""

    def __init__(self, path: Path):
        self.path = path
        self.open: dict[tuple[str, int, float], str] = {}
        """Fates by name, process and beginning."""
        self.longest: dict[str, float] = {}
        self.met: Counter[str] = Counter()
        self.returned: list[tuple[int, ...]] = []
        self._read = 0

    async def keep(self) -> None:
        """Look every half second."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(0.5)

    def look(self) -> None:
        """Read further lines; an episode is over when its agent has ended, or its process."""
        now = time.time()
        with suppress(FileNotFoundError), self.path.open() as file:
            file.seek(self._read)
            while (line := file.readline()).endswith("\n"):
                self._read = file.tell()
                self._take(json.loads(line))
        for episode, fate in list(self.open.items()):
            _, pid, began = episode
            self.longest[fate] = max(self.longest.get(fate, 0.0), now - began)
            if not psutil.pid_exists(pid):
                self._over(episode)

    def _take(self, line: dict) -> None:
        episode = line["name"], line["pid"], line["began"]
        if line["event"] == "began":
            self.open[episode] = line["fate"]
            return
        if line["event"] == "returned":
            self.returned.append(tuple(line["tokens"]))
        self._over(episode)

    def _over(self, episode: tuple[str, int, float]) -> None:
        if fate := self.open.pop(episode, ""):
            self.met[fate] += 1

    def too_long(self) -> str:
        """Return what waited beyond its deadline, or nothing."""
        return ", ".join(
            f"an episode with the fate '{fate}' was over after {seconds:.1f} s"
            for fate, seconds in self.longest.items()
            if seconds > LONGEST.get(fate, DEADLINE_SECONDS) + GRACE_SECONDS
        )


def write_tasks(path: Path, seed: int) -> None:
    """Write the tasks, a seeded share of them with a fate; every fate is drawn once before any is drawn again."""
    chance = random.Random(f"fates/{seed}")
    fates: list[str] = []
    with path.open("w") as file:
        for number in range(TASKS):
            fates = fates or chance.sample(FATES, len(FATES))
            fate = fates.pop() if chance.random() < FATED else ""
            file.write(json.dumps({"task": {"number": number, "fate": fate}}) + "\n")


def write_run(folder: Path) -> Path:
    """Write the run file of the form."""
    environment, endpoint = free_ports(2, neighbor=100)
    play = {"file": f"{HERE / 'hanging_agent.py'}:play", "answer_deadline_seconds": DEADLINE_SECONDS}
    sections: dict[str, dict[str, object]] = {
        "addresses": {"environment": f"127.0.0.1:{environment}"},
        "run": {"groups_per_step": 4, "max_staleness": 1, "max_queued_prompts": 32, "max_deliveries": 1000},
        "run.environment": play,
        "run.environment.parameters": {"folder": str(folder / "played")},
        "data": {"train": str(folder / "tasks.jsonl"), "passes": 1},
        "rollout": {"engine": "vllm", "max_running_completions": 16},
        "rollout.http": {"address": f"127.0.0.1:{endpoint}"},
        "rollout.vllm": {"kv_cache_gib": 0.0625, "max_num_seqs": 16, "max_num_batched_tokens": 1024},
        "environment": {"workers": 2, "hang_seconds": HANG_SECONDS},
        "trainer": {"skip_zero_advantage": False, "callbacks": [f"{HERE / 'trained_groups.py'}:TrainedGroups"]},
        "trainer.checkpoint": {"interval": 5},
    }
    return write_demo_run(folder, RUN, **sections)


async def run(folder: Path, seed: int, count: int, pythons: Pythons, say: Callable[[str], None]) -> AgentsReport:
    """Execute a run in a new folder, with preloaded services, under `count` signals."""
    report, began = AgentsReport(seed, count), time.monotonic()
    (folder / "played").mkdir(parents=True)
    interpreters = {name: pythons[name] for name in (*SERVICES, "client")} | {"rollout": pythons["vllm"]}
    await asyncio.to_thread(make_models, pythons["trainer"], folder / "model")
    # The launcher's check of the rollout does not wait for the imports of a preloaded interpreter.
    command = [interpreters["rollout"], "-c", ""]
    await asyncio.to_thread(subprocess.run, command, check=True, timeout=READY_SECONDS)
    write_tasks(folder / "tasks.jsonl", seed)
    run_file = write_run(folder)
    checkout = preloaded_checkout(folder / "checkout", interpreters)
    launched = Launched([str(run_file)], folder / "output.txt", checkout=checkout)
    watch = Watch(folder / "played" / "played.jsonl")
    watching = asyncio.create_task(watch.keep())
    try:
        await strike(launched, list(draw(seed, count, TARGETS)), report, say, TARGETS)
        await end_prompts(run_file, RUN)
        report.judge(launched, await asyncio.to_thread(launched.wait, END_SECONDS))
        watch.look()
        report.failure = report.failure or watch.too_long() or compared(folder, watch, report)
    except (AssertionError, TimeoutError, QuartetError, subprocess.TimeoutExpired) as error:
        report.failure = str(error) or repr(error)
    finally:
        watching.cancel()
        launched.close()
    report.longest, report.met, report.returned = watch.longest, watch.met, len(watch.returned)
    report.seconds = round(time.monotonic() - began, 1)
    report.count(launched)
    return report


def compared(folder: Path, watch: Watch, report: AgentsReport) -> str:
    """Return how what was trained differs from what the agent returned, or nothing."""
    groups: dict[str, dict] = {}
    for line in (folder / "run" / "trained.jsonl").read_text().splitlines():
        group = json.loads(line)
        if (first := groups.setdefault(group["instance"], group)) | {"step": 0} != group | {"step": 0}:
            return f"a group was trained as {first} and as {group}"
    report.trained = len(groups)
    played: Counter[tuple[int, ...]] = Counter()
    for group in groups.values():
        episodes = [tuple(tokens) for tokens in group["tokens"]]
        if len(episodes) != GROUP_SIZE or group["rewards"] != [1.0 + sum(tokens) % 97 for tokens in episodes]:
            return f"the rewards are not those of the episodes: {group}"
        played.update(episodes)
    if more := played - Counter(watch.returned):
        return f"{more.total()} episodes were trained more often than the agent returned: {more.most_common(1)}"
    return "" if groups else "nothing was trained"
