"""The worker processes of one environment, each of which plays several episodes at once.

An episode ends when its agent has, at its deadline, or when its call is cancelled. One that goes on 2 s after its end
is left behind: its process gets no new episodes and is killed when the others in it have ended. A process whose event
loop an agent blocks is killed at once; its episodes fail, retryably, and the prompt that blocked it is played in a
process of its own from then on, so that it takes no others with it again. Each process that ends is replaced.
Runs take turns at the processes (`quartet_server.fair_queue`).
"""

import asyncio
import itertools
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Any

from quartet_common.log import get_logger
from quartet_environment import metrics
from quartet_environment.config import EnvironmentServiceSection
from quartet_environment.errors import EpisodeFailed, PoolFull
from quartet_environment.output import OutputLog
from quartet_server.fair_queue import RunQueue
from quartet_server.worker_process import WorkerCommand, WorkerDied, WorkerProcess

log = get_logger(__name__)

_OBEY_SECONDS = 2.0
_WAIT_SECONDS = 5.0  # for a process that can take an episode; less than the grace that rollouts give a call
_SILENT_SECONDS = 5.0  # beyond hang_seconds: an agent that holds the interpreter's lock also stops the beats
_LOOK_SECONDS = 0.5
_STALLED_SECONDS = 1.0  # a process that an agent blocks for so long gets no more episodes until it goes on
_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 15.0
_MOST_SUSPECTS = 1000

Answer = dict[str, Any]


class _Worker:
    """A process, and the episodes in it by number."""

    def __init__(self, process: WorkerProcess, alone: bool):
        self.process, self.alone = process, alone
        self.playing: dict[int, asyncio.Future[Answer]] = {}
        self.keys: dict[int, Hashable] = {}
        self.left: set[int] = set()
        """Episodes that went on after their end."""
        self.ready, self.is_ending = asyncio.Event(), False
        self.leaving = asyncio.Event()
        """Set when it gets no more episodes."""
        self.silent, self.stalled = 0.0, 0.0
        self.reason = "died"
        self.failures: dict[int, EpisodeFailed] = {}
        """Of episodes that are to blame for its end."""

    @property
    def is_ready(self) -> bool:
        return self.ready.is_set()

    def leave(self, reason: str) -> None:
        if not self.leaving.is_set():
            self.reason = reason
            self.leaving.set()

    def kill(self, reason: str) -> None:
        self.leave(reason)
        self.is_ending = True
        self.process.kill()


class EpisodePool:
    """Worker processes for the episodes of one environment."""

    def __init__(self, name: str, command: WorkerCommand, section: EnvironmentServiceSection):
        self._name, self._command, self._section = name, command, section
        self._workers: set[_Worker] = set()
        self._numbers = itertools.count(1)
        self._suspects: OrderedDict[Hashable, None] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        waiting, running = (metrics.QUEUE_DEPTH.labels(name, state) for state in ("waiting", "running"))
        self._places: RunQueue[int] = RunQueue(waiting, running, PoolFull)
        self._freed = asyncio.Event()
        """Set, and replaced, when a process may have become able to take an episode."""
        self.ready = asyncio.Event()
        """Set when the first process can play."""
        metrics.EPISODES.labels(name).set_function(lambda: self.playing)
        metrics.WORKERS_ALIVE.labels(name).set_function(lambda: len(self._workers))

    @property
    def pids(self) -> frozenset[int]:
        """Process ids, including processes that are starting or ending."""
        return frozenset(worker.process.pid for worker in self._workers)

    @property
    def playing(self) -> int:
        """Episodes that are played, or that go on after their end."""
        return sum(len(worker.playing) for worker in self._workers)

    def start(self) -> None:
        """Start the processes in the background."""
        self._places.add(*range(self._section.workers * self._section.episodes_per_worker))
        for _ in range(self._section.workers):
            self._spawn(self._keep_one())
        self._spawn(self._watch())

    async def close(self) -> None:
        """Kill all processes; their episodes fail, retryably. May be called again."""
        self._closed = True
        self._places.close()
        self._wake()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def play(self, request: dict[str, Any], deadline_seconds: float, key: Hashable, run: str) -> Answer:
        """Play an episode and return its answer; one that is cancelled ends.

        Args:
            request: "task", "endpoint" and "parameters" for the worker process.
            deadline_seconds: the episode's time.
            key: the same for episodes of the same prompt.
            run: whose turn it is.

        Raises:
            EpisodeFailed: it took too long, its process ended, or the pool is closed.
            PoolFull: no process could take it for five seconds.
        """
        async with self._process(key, run) as worker:
            return await self._play(worker, request, deadline_seconds, key)

    async def _play(self, worker: _Worker, request: dict[str, Any], deadline_seconds: float, key: Hashable) -> Answer:
        number, future = next(self._numbers), asyncio.get_running_loop().create_future()
        worker.playing[number], worker.keys[number] = future, key
        try:
            with suppress(WorkerDied):  # the process's own task says why
                await worker.process.send({"event": "play", "id": number, **request})
            await asyncio.wait({future}, timeout=deadline_seconds)
            if not future.done():
                raise EpisodeFailed(f"the episode took longer than its {deadline_seconds:g} s")
            answer = future.result()
            self._suspects.pop(key, None)
            return answer
        finally:
            if future.done():
                self._ended(worker, number)
            elif not self._closed:
                self._spawn(self._stop(worker, number, future))

    def _free(self) -> list[_Worker]:
        return [
            each
            for each in self._workers
            if each.is_ready and not each.leaving.is_set() and not each.alone
            if len(each.playing) < self._section.episodes_per_worker and each.stalled < _STALLED_SECONDS
        ]

    @asynccontextmanager
    async def _process(self, key: Hashable, run: str) -> AsyncIterator[_Worker]:
        """Give a process to a run whose turn it is; one of its own to a prompt that blocked one before.

        Raises PoolFull, EpisodeFailed.
        """
        if key in self._suspects:
            yield await self._alone()
            return
        last = asyncio.get_running_loop().time() + _WAIT_SECONDS
        try:
            place = await self._places.acquire(run, _WAIT_SECONDS)
        except TimeoutError:
            raise PoolFull from None
        try:
            yield await self._least_busy(last)
        finally:
            self._places.release(place)

    async def _least_busy(self, last: float) -> _Worker:
        """Return the process that plays the fewest episodes; wait until `last`, of the loop's clock, for one that can
        take another. Raises PoolFull."""
        try:
            async with asyncio.timeout_at(last):
                while not self._closed:
                    if free := self._free():
                        return min(free, key=lambda each: len(each.playing))
                    await self._freed.wait()
        except TimeoutError:
            pass
        raise PoolFull

    def _wake(self) -> None:
        """Have those that wait for a process look again."""
        self._freed.set()
        self._freed = asyncio.Event()

    async def _alone(self) -> _Worker:
        """Return a new process for one episode of a prompt that blocked one before. Raises PoolFull, EpisodeFailed."""
        if self._closed or sum(each.alone for each in self._workers) >= self._section.workers:
            raise PoolFull
        try:
            worker = self._made(alone=True)
        except OSError as error:
            raise EpisodeFailed(f"no process could be started for the episode: {error}") from error
        running = self._spawn(self._run(worker))
        ready = asyncio.create_task(worker.ready.wait())
        try:
            await asyncio.wait({ready, running}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            worker.kill("alone")
            raise
        finally:
            ready.cancel()
        if not worker.is_ready:
            raise EpisodeFailed("no process could be started for the episode")
        return worker

    async def _stop(self, worker: _Worker, number: int, future: "asyncio.Future[Answer]") -> None:
        """End an episode whose time is over. If it does not obey, its process ends when the others in it have."""
        with suppress(WorkerDied):
            await worker.process.send({"event": "cancel", "id": number})
        await asyncio.wait({future}, timeout=_OBEY_SECONDS)
        if future.done():
            self._ended(worker, number)
            return
        worker.left.add(number)
        worker.leave("disobedient")
        log.warning(
            "an episode goes on after its end: its process ends when the others in it have",
            extra={"environment": self._name, "worker": worker.process.pid, "others": len(worker.playing) - 1},
        )
        self._end_if_idle(worker)
        lingering = [each for each in self._workers if each.left and not each.is_ending]
        if len(lingering) > self._section.workers:
            lingering[0].kill("disobedient")

    def _ended(self, worker: _Worker, number: int) -> None:
        worker.playing.pop(number, None)
        worker.keys.pop(number, None)
        self._end_if_idle(worker)
        self._wake()

    def _end_if_idle(self, worker: _Worker) -> None:
        if worker.alone and not worker.playing:
            worker.kill("alone")
        elif worker.leaving.is_set() and worker.playing.keys() <= worker.left:
            worker.kill(worker.reason)

    async def _keep_one(self) -> None:
        """Keep a process that takes episodes; a failed start is logged and retried with backoff."""
        pause = _FIRST_RETRY_SECONDS
        while True:
            try:
                worker = self._made()
                running = self._spawn(self._run(worker))
                await worker.leaving.wait()
                if worker.is_ready:
                    pause = _FIRST_RETRY_SECONDS
                    continue
                await asyncio.wait({running})
            except OSError as error:
                log.error("a worker process does not start: %s", error)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LAST_RETRY_SECONDS)

    def _made(self, alone: bool = False) -> _Worker:
        """Start a process. Raises OSError."""
        end, output = os.pipe()
        try:
            process = WorkerProcess(self._command, output)
        except BaseException:
            os.close(end)
            raise
        finally:
            os.close(output)
        self._spawn(OutputLog(self._name, process.pid).read(end))
        worker = _Worker(process, alone)
        self._workers.add(worker)
        return worker

    async def _run(self, worker: _Worker) -> None:
        """Take what a process says until it ends; then its episodes fail."""
        ending = "its process ended"
        try:
            await worker.process.await_ready()
            worker.silent = 0.0
            worker.ready.set()
            self.ready.set()
            self._wake()
            while True:
                self._take(worker, await worker.process.receive())
        except WorkerDied as error:
            ending = f"its process ended: {error}"
            if not worker.is_ending:
                log.error("a worker process ended: %s", error, extra={"environment": self._name})
        finally:
            worker.leave("died")
            self._fail_all(worker, ending)
            await worker.process.end()
            self._workers.discard(worker)
            metrics.WORKERS_ENDED.labels(self._name, worker.reason).inc()

    def _fail_all(self, worker: _Worker, ending: str) -> None:
        if self._closed:
            ending = "the environment service is shutting down"
        elif worker.failures:
            (first,) = itertools.islice(worker.failures.values(), 1)
            ending = f"its process was killed because another episode in it hung: {first.message}"
        for number, future in worker.playing.items():
            if not future.done():
                future.set_exception(worker.failures.get(number) or EpisodeFailed(ending))
                future.exception()  # retrieved: nobody may wait for it any more

    def _take(self, worker: _Worker, message: dict[str, Any]) -> None:
        worker.silent = 0.0
        match message["event"]:
            case "beat":
                if worker.stalled > message["stalled"]:
                    self._wake()
                worker.stalled = message["stalled"]
            case "hung":
                self._hung(worker, message)
            case _:
                future = worker.playing.get(message["id"])
                if future is not None and not future.done():
                    future.set_result(message)
                if message["id"] in worker.left:
                    worker.left.discard(message["id"])
                    self._ended(worker, message["id"])

    def _hung(self, worker: _Worker, message: dict[str, Any]) -> None:
        """Kill a process that an episode blocks, and remember the episode's prompt; all if it is not known which."""
        seconds, place = message["seconds"], message.get("place", "")
        where = f" at {place}" if place else ""
        known = message.get("id") in worker.playing
        to_blame = [message["id"]] if known else list(worker.playing)
        for number in to_blame:
            who = "the agent" if known else "an agent"
            worker.failures[number] = EpisodeFailed(
                f"{who} blocked its process for {seconds:.0f} s{where} (environment.hang_seconds): await what takes "
                "time, or write play as a plain function, which gets a thread",
                place=place,
                traceback=message.get("traceback", ""),
            )
            self._suspects[worker.keys[number]] = None
        while len(self._suspects) > _MOST_SUSPECTS:
            self._suspects.popitem(last=False)
        log.error(
            "a worker process hung for %.0f s%s and is killed",
            seconds,
            where,
            extra={"environment": self._name, "episodes": len(worker.playing)},
        )
        worker.kill("hung")

    async def _watch(self) -> None:
        """Kill processes that say nothing; time in which this process itself stood still does not count."""
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            before, looked = looked, time.monotonic()
            for worker in tuple(self._workers):
                worker.silent += min(looked - before, 2 * _LOOK_SECONDS)
                is_silent = worker.silent > self._section.hang_seconds + _SILENT_SECONDS
                if is_silent and worker.is_ready and not worker.is_ending:
                    self._hung(worker, {"id": None, "seconds": worker.silent})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a part of the pool failed", exc_info=error, extra={"environment": self._name})
