"""The processes of a chaos run: two of each service, one Redis, and a client that submits prompts. They are restarted
when they exit, and their events are read.

To test another broker or reward service, name its command, e.g. `QUARTET_CHAOS_BROKER="/opt/my-broker --fast"`; the
path of the run file is appended as the last argument.
"""

import asyncio
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import content
from network import BROKERS, REWARDS, ROLLOUTS, TRAINERS, Hosts, Loopback
from standin_trainer import CHECKPOINT_EVERY

from victim import Victim  # isort: skip
from started import redis_command, write_run_file  # isort: skip (beside what `victim` imports)

HERE = Path(__file__).resolve().parent

RUN = "chaos"
GROUPS_PER_STEP = 5
TTL_SECONDS = 2.0  # of leases and members
REDIS_TIMEOUT_SECONDS = 1.0
_UNUSABLE = 2  # exit status of a broker that cannot reach Redis at its start


@dataclass(frozen=True)
class Plan:
    """The parameters of a chaos run.

    Attributes:
        folder: for data, logs, checkpoints; must be empty.
        control: the protection that the trainer omits (standin_trainer.Trainer).
        each: processes of each service, 1 or 2.
        lead: number of faults by which training may be ahead.
    """

    folder: Path
    groups: int
    control: str = ""
    each: int = 2
    lead: int = 3

    def checkpoints(self, trainer: str) -> Path:
        return self.folder / "checkpoints" / trainer


class Deployment:
    """All processes, and the events they reported."""

    def __init__(self, plan: Plan, place: Loopback | Hosts, pythons: Mapping[str, Path]):
        self.plan = plan
        self.place = place
        self._pythons = pythons
        self.trap = plan.folder / "trap"
        self.pace = plan.folder / "pace"
        self.committed = 0  # groups, according to the trainers' events
        self.leader = ""  # name of the trainer that opened the newest session, according to the events
        self._session = 0  # that session
        self.events: Counter[str] = Counter()  # events by name
        self.finished = ""  # the trainer that finished the run
        self.failure = ""
        self.news = asyncio.Event()  # set at each event
        self.trapped: asyncio.Queue[Victim] = asyncio.Queue()
        self.victims: dict[str, Victim] = {}
        self._keepers: dict[str, asyncio.Task] = {}
        self._ended: set[str] = set()
        self._prepare()

    def _prepare(self) -> None:
        for name in ("logs", "redis"):
            (self.plan.folder / name).mkdir(parents=True)
        content.write_prompts(self.plan.folder / "prompts.jsonl", self.plan.groups)
        commands = {"redis": self._redis(), "feeder": self._feeder()}
        services = (self._service, BROKERS), (self._service, REWARDS)
        for make, names in (*services, (self._rollout, ROLLOUTS), (self._trainer, TRAINERS)):
            commands |= {name: make(name) for name in self._some(names)}
        for name, command in commands.items():
            log = self.plan.folder / "logs" / f"{name}.log"
            self.victims[name] = Victim(name, self.place.command(name, command), log, self._hear)

    def _some(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return names[: self.plan.each]

    # Commands

    def _redis(self) -> list[str]:
        host, _, port = self.place.address("redis").rpartition(":")
        options = {
            "protected-mode": "no",
            "appendfsync": "always",
            # Small, so that some kills happen during a rewrite.
            "auto-aof-rewrite-min-size": "1mb",
            "auto-aof-rewrite-percentage": "10",
        }
        return redis_command(int(port), self.plan.folder / "redis", True, host, **options)

    def _run_file(self, name: str) -> Path:
        host, _, port = self.place.address("redis").rpartition(":")
        sections: dict[str, dict[str, object]] = {
            "run": {
                "id": RUN,
                "folder": str(self.plan.folder / "run"),
                "group_size": content.GROUP_SIZE,
                "groups_per_step": GROUPS_PER_STEP,
                "max_staleness": 2,
                "max_deliveries": 1000,  # failures are injected: no prompt may become dead
                "max_queued_prompts": max(40, self.plan.groups // 20),
                "prompt_lease_ttl": TTL_SECONDS,
                "member_ttl": TTL_SECONDS,
                "partial_batch": "train",
            },
            "security": {"insecure": True},
            "server": {"metrics": False, "drain_seconds": 2.0},
            "data": {"train": str(self.plan.folder / "prompts.jsonl")},
            "broker": {
                "redis_url": f"redis://{host}:{port}/0",
                "redis_timeout": REDIS_TIMEOUT_SECONDS,
                "sweep_interval": 0.5,
            },
        }
        if name in (*BROKERS, *REWARDS):
            sections["addresses"] = {name.partition("-")[0]: self.place.address(name)}
        return write_run_file(self.plan.folder / f"{name}.toml", sections)

    def _service(self, name: str) -> list[str]:
        kind = name.partition("-")[0]
        named = os.environ.get(f"QUARTET_CHAOS_{kind.upper()}")
        command = shlex.split(named) if named else [str(self._pythons[kind]), "-m", f"quartet_{kind}"]
        return [*command, str(self._run_file(name))]

    def _feeder(self) -> list[str]:
        return [str(self._pythons["dev"]), str(HERE / "feeder.py"), str(self._run_file("feeder")), *self.brokers()]

    def _rollout(self, name: str) -> list[str]:
        rewards = [self.place.address(reward) for reward in self._some(REWARDS)]
        return self._standin("rollout", name, rewards=rewards)

    def _trainer(self, name: str) -> list[str]:
        folders = {each: str(self.plan.checkpoints(each)) for each in self._some(TRAINERS)}
        own = folders.pop(name)
        Path(own).mkdir(parents=True)
        files = {"trap": str(self.trap), "pace": str(self.pace)}
        others = list(folders.values())
        return self._standin("trainer", name, folder=own, others=others, control=self.plan.control, **files)

    def _standin(self, kind: str, name: str, **settings: object) -> list[str]:
        settings |= {"name": name, "run": RUN, "brokers": self.brokers(), "ttl": TTL_SECONDS}
        return [str(self._pythons["dev"]), str(HERE / f"standin_{kind}.py"), json.dumps(settings)]

    def brokers(self) -> list[str]:
        return [self.place.address(broker) for broker in self._some(BROKERS)]

    # Supervision

    def start(self) -> None:
        """Start all processes, and restart those that exit."""
        for name, victim in self.victims.items():
            self._keepers[name] = asyncio.create_task(self._keep(victim), name=f"keep {name}")

    async def _keep(self, victim: Victim) -> None:
        while True:
            await victim.allowed.wait()
            await victim.start()
            status = await victim.wait()
            if self.leader == victim.name:
                self.leader = ""
            if status == 0 and not victim.killed and victim.kind in ("rollout", "trainer"):
                self._ended.add(victim.name)
                self.news.set()
                return
            if status == 0 and not victim.killed and victim.kind == "feeder":
                victim.allowed.clear()  # all is submitted; a fault may start it again
            elif not victim.killed:
                if not (victim.kind == "broker" and status == _UNUSABLE):
                    self.fail(f"{victim.name} exited by itself with status {status}: {victim.last_line}")
                    return
                await asyncio.sleep(0.1)

    def fail(self, why: str) -> None:
        self.failure = self.failure or why
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition. Raises RuntimeError if the run has failed."""
        while not condition():
            if self.failure:
                raise RuntimeError(self.failure)
            self.news.clear()
            await self.news.wait()

    @property
    def over(self) -> bool:
        """True when the run is finished and rollouts and trainers have exited."""
        return {name for name in self.victims if name.startswith(("rollout", "trainer"))} <= self._ended

    async def close(self) -> None:
        """Stop all processes, the clients first."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        for kinds in (("rollout", "trainer", "feeder"), ("broker", "reward"), ("redis",)):
            await asyncio.gather(*(victim.end() for victim in self.victims.values() if victim.kind in kinds))

    # Events

    def _hear(self, victim: Victim, event: Mapping[str, Any]) -> None:
        what = event["event"]
        self.events[f"put {event['outcome']}" if what == "put" else what] += 1
        match what:
            case "leading":
                # Events of two processes may arrive out of order.
                if event["session"] > self._session:
                    self._session, self.leader = event["session"], victim.name
                self._reached(event["step"])
            case "committed":
                self._reached(event["step"])
            case "fenced":
                if self.leader == victim.name:
                    self.leader = ""
            case "trapped":
                victim.killed = True
                victim.ready.clear()
                if event["point"] != "settling":  # `_restore` does not wait for it
                    self.trapped.put_nowait(victim)
            case "finished":
                self.finished = victim.name
            case "fault":
                self.fail(f"{victim.name}: {event['what']}")
        self.news.set()

    def _reached(self, step: int) -> None:
        self.committed = max(self.committed, min(self.plan.groups, step * GROUPS_PER_STEP))

    def allow(self, groups: int) -> None:
        """Let the trainer train this many groups plus two checkpoints, so that it does not outrun the faults."""
        ahead = 2 * CHECKPOINT_EVERY * GROUPS_PER_STEP
        writing = self.pace.with_suffix(".writing")
        writing.write_text(str((groups + ahead) // GROUPS_PER_STEP))
        writing.rename(self.pace)
