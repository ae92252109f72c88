"""Injects faults into the processes of a chaos run, one after the other as they fall due."""

import asyncio
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
from deployment import Deployment
from schedule import Fault
from victim import Victim

READY_SECONDS = 120.0  # for a process to be ready again before its next fault
TRAP_SECONDS = 120.0  # for the trainer to reach the trap's point


class Injector:
    """Injects a schedule of faults.

    Args:
        say: prints a line for each fault.
    """

    def __init__(self, deployment: Deployment, schedule: list[Fault], say: Callable[[str], None]):
        self.deployment = deployment
        self.schedule = schedule
        self.done = 0
        self._say = say
        self._mending: set[asyncio.Task] = set()
        self._snapshots: list[tuple[Path, int]] = []  # with the number of groups committed then

    async def run(self) -> None:
        """Inject all faults; return when stopped processes run again and cuts are undone.

        Raises RuntimeError if a fault cannot be injected, or the run has failed.
        """
        for number, fault in enumerate(self.schedule, start=1):
            self.deployment.allow(self._pace())
            await self.deployment.until(lambda due=fault.at: self.deployment.committed >= due)
            try:
                description = await self._do(fault)
            except (TimeoutError, psutil.Error) as error:
                raise RuntimeError(f"fault {number} ({fault}) could not be done: {error!r}") from error
            self.done = number
            self._say(f"{number:4}/{len(self.schedule)}  {self.deployment.committed:5} groups  {description}")
        self.deployment.allow(2 * self.deployment.plan.groups)  # one control trains some groups twice
        if self._mending:
            await asyncio.wait(self._mending)

    def _pace(self) -> int:
        """Return the number of groups that may be trained before the next faults."""
        return self.schedule[min(self.done + self.deployment.plan.lead, len(self.schedule) - 1)].at

    async def _do(self, fault: Fault) -> str:
        """Inject one fault; return its description."""
        match fault.kind:
            case "kill" | "terminate":
                victims = [await self._at_work(name) for name in fault.target.split()]
                await asyncio.gather(*(self._end(victim, fault.kind == "kill") for victim in victims))
            case "pause":
                victim = await self._at_work(fault.target)
                self._mend(self._resume_later(victim, await victim.pause(), fault.seconds))
            case "cut":
                one, other = [[await self._resolved(name) for name in side.split()] for side in fault.target.split("|")]
                self.deployment.place.cut(one, other)
                self._mend(self._heal_later(one, other, fault.seconds))
            case "trap":
                return f"{fault}: {(await self._trap(fault.target)).name}"
            case "snapshot":
                await self._take_snapshot()
            case "restore":
                return await self._restore(fault.pick, "settling" in fault.target)
            case _:
                raise ValueError(f"no fault is called '{fault.kind}'")
        return str(fault)

    async def _resolved(self, name: str) -> str:
        if name != "leader":
            return name
        await self.deployment.until(lambda: bool(self.deployment.leader))
        return self.deployment.leader

    async def _at_work(self, name: str) -> Victim:
        """Wait until a process is ready and not paused, so that a fault has an effect."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                victim = self.deployment.victims[await self._resolved(name)]
                if victim.kind == "feeder" and not victim.allowed.is_set():
                    victim.allowed.set()  # it has submitted all: restart it, so that the fault interrupts it
                await victim.ready.wait()
                if victim.paused:
                    await asyncio.wait(self._mending, return_when=asyncio.FIRST_COMPLETED)
                elif victim.name == await self._resolved(name):
                    return victim

    async def _end(self, victim: Victim, kill: bool) -> None:
        try:
            await victim.end_with(signal.SIGKILL if kill else signal.SIGTERM)
        except psutil.NoSuchProcess:
            victim.killed = False  # it exited at the same moment: the run is over

    def _mend(self, work) -> None:
        task = asyncio.create_task(work)
        self._mending.add(task)
        task.add_done_callback(self._mending.discard)

    async def _resume_later(self, victim: Victim, process: psutil.Process, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if process.is_running():
            victim.paused = False
            process.resume()

    async def _heal_later(self, one: list[str], other: list[str], seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.deployment.place.heal(one, other)

    async def _trap(self, point: str) -> Victim:
        """Set a trap, and return the trainer that died in it."""
        self._set_trap(point)
        self.deployment.allow(max(self.deployment.committed, self._pace()))  # enough steps to reach the point
        async with asyncio.timeout(TRAP_SECONDS):
            return await self.deployment.trapped.get()

    def _set_trap(self, point: str) -> None:
        writing = self.deployment.trap.with_suffix(".writing")
        writing.write_text(point)
        writing.rename(self.deployment.trap)

    async def _take_snapshot(self) -> None:
        """Copy Redis' data while it is stopped."""
        await self.deployment.until(lambda: self.deployment.events["leading"] > 0)  # the run exists
        victim = await self._at_work("redis")
        folder = self.deployment.plan.folder / "snapshots" / str(len(self._snapshots))
        process = await victim.pause()
        try:
            await asyncio.to_thread(shutil.copytree, self.deployment.plan.folder / "redis", folder)
        finally:
            process.resume()
            victim.paused = False
        self._snapshots.append((folder, self.deployment.committed))

    async def _restore(self, pick: float, kill_who_settles: bool) -> str:
        """Restart Redis from a snapshot; all other processes keep running."""
        if not self._snapshots:
            await self._take_snapshot()
        number = round(pick * (len(self._snapshots) - 1))
        snapshot, committed = self._snapshots[number]
        if kill_who_settles:
            self._set_trap("settling")
        redis = await self._at_work("redis")
        redis.allowed.clear()
        await redis.end_with(signal.SIGKILL)
        async with asyncio.timeout(READY_SECONDS):
            while redis.running:
                await asyncio.sleep(0.01)
        data = self.deployment.plan.folder / "redis"
        shutil.rmtree(data)
        shutil.copytree(snapshot, data)
        redis.allowed.set()
        await self._at_work("redis")
        return f"redis is back at snapshot {number + 1}, of {committed} groups"
