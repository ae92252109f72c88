"""The worker process of an environment: plays several episodes at once in one event loop.

Run by `python -m quartet_environment.player`. Requests and answers, with the number of an episode:

    -> {"event": "play", "id": 1, "task": {…}, "endpoint": {…}, "parameters": {…}}
    -> {"event": "cancel", "id": 1}
    <- {"id": 1, "event": "finished", "seats": […], "notes": "…"}
    <- {"id": 1, "event": "failed", "message": "…", "retryable": false, "place": "FILE:LINE", "traceback": "…"}
    <- {"id": 1, "event": "refused", "key": "hops", "came": "…", "allowed": "…"}      a parameter
    <- {"event": "beat", "stalled": 0.0}          each half second; how long the event loop has stood still, in seconds
    <- {"event": "hung", "id": 1 | null, "seconds": 10.0, "place": "FILE:LINE", "traceback": "…"}

With `--describe` it prints what the environment is, and what it refuses of the parameters on its input, as JSON; with
`--tasks` it answers {"event": "tasks", "parameters": {…}, "limit": 10} with {"event": "task", "task": {…}} for each,
then {"event": "end"}.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any, BinaryIO
from weakref import WeakKeyDictionary

from quartet_common.python_file import FileError
from quartet_common.values import check_values
from quartet_environment import failures
from quartet_environment.agent import Endpoint, Task
from quartet_environment.function import Function, InvalidParameter, Refused, in_thread
from quartet_environment.seats import NoReward, read_result
from quartet_server import worker_protocol

BEAT_SECONDS = 0.5
LARGEST_TASK = worker_protocol.LONGEST_LINE - 1024
_TICK_SECONDS = 0.1
_CLOSE_SECONDS = 2.0
_THREADS = 64

_EPISODE: ContextVar[int | None] = ContextVar("quartet_episode", default=None)


class Player:
    """Plays the episodes that the service asks for, and says if one of them blocks the event loop."""

    def __init__(self, function: Function, answers: BinaryIO, hang_seconds: float):
        self._function, self._answers, self._hang_seconds = function, answers, hang_seconds
        self._sending = threading.Lock()
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._episode_of: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._ticks = 0

    async def run(self, requests: BinaryIO) -> None:
        """Play until the requests end."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_task_factory(self._made_task)
        self._loop.set_default_executor(ThreadPoolExecutor(_THREADS))
        threading.Thread(target=self._read, args=(requests,), daemon=True).start()
        threading.Thread(target=self._watch, args=(threading.get_ident(),), daemon=True).start()
        self._send({"event": "ready"})
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._ticks += 1

    def _made_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        """Remember which episode made a task: what it leaves is cancelled with it."""
        task: asyncio.Task[Any] = asyncio.Task(coroutine, loop=loop, **options)
        if (episode := _EPISODE.get()) is not None:
            self._episode_of[task] = episode
        return task

    def _read(self, requests: BinaryIO) -> None:
        for line in requests:
            self._loop.call_soon_threadsafe(self._take, worker_protocol.unpack(line))
        os._exit(0)  # the service is gone

    def _take(self, message: dict[str, Any]) -> None:
        episode = message["id"]
        if message["event"] == "cancel":
            if episode in self._playing:
                self._playing[episode].cancel()
            return
        context = copy_context()
        context.run(_EPISODE.set, episode)
        task = self._playing[episode] = self._loop.create_task(self._episode(message), context=context)
        self._episode_of[task] = episode

    async def _episode(self, message: dict[str, Any]) -> None:
        episode, endpoint = message["id"], Endpoint(**message["endpoint"])
        try:
            answer = await self._answer(message, endpoint)
        finally:
            self._playing.pop(episode, None)
        with suppress(Exception, asyncio.CancelledError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.gather(*(client.close() for client in endpoint.opened), return_exceptions=True)
        for task, owner in tuple(self._episode_of.items()):
            if owner == episode and task is not asyncio.current_task():
                task.cancel()
        self._send({"id": episode, **answer})

    async def _answer(self, message: dict[str, Any], endpoint: Endpoint) -> dict[str, Any]:
        function = self._function
        try:
            # In a thread of its own, since agents may keep those of the loop busy: the check of a package's parameters
            # may import for seconds, in which no episode could go on.
            parameters = await in_thread(lambda: function.check(message["parameters"]))
            task = Task(**message["task"], parameters=parameters)
            return {"event": "finished", **read_result(await function.play(task, endpoint, parameters))}
        except InvalidParameter as error:
            return {"event": "refused", "key": error.key, "came": error.came, "allowed": error.allowed}
        except NoReward as error:
            return failures.failed(f"environment '{function.name}' {error}", retryable=False, place=function.file)
        except BaseException as error:  # a SystemExit of the agent must not end this process
            return failures.of_exception(function.name, function.file, error)

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            self._answers.write(worker_protocol.pack(message))
            self._answers.flush()

    def _watch(self, loop_thread: int) -> None:
        """Beat, and say when the event loop has stood still too long; time in which this process did does not count."""
        seen, stalled, looked = -1, 0.0, time.monotonic()
        while True:
            time.sleep(BEAT_SECONDS)
            before, looked = looked, time.monotonic()
            stalled = 0.0 if self._ticks != seen else stalled + min(looked - before, 2 * BEAT_SECONDS)
            seen = self._ticks
            if stalled >= self._hang_seconds:
                self._send({"event": "hung", "seconds": stalled, **self._blocked(loop_thread)})
                return  # the service kills this process
            self._send({"event": "beat", "stalled": stalled})

    def _blocked(self, loop_thread: int) -> dict[str, Any]:
        """Return the episode that the event loop's thread is in, if it is known, and where."""
        task = asyncio.current_task(self._loop)
        frames = traceback.extract_stack(sys._current_frames()[loop_thread])
        own = [frame for frame in frames if frame.filename == self._function.file] or frames
        return {
            "id": None if task is None else self._episode_of.get(task),
            "place": f"{own[-1].filename}:{own[-1].lineno}",
            "traceback": "".join(traceback.format_list(frames))[-failures.LONGEST_TRACEBACK :],
        }


async def warm_up() -> None:
    """Make a client, which imports openai for seconds: the first episode must not block others meanwhile."""
    with suppress(ImportError):
        async with Endpoint("http://127.0.0.1:9/v1", "none", "none").client as client:
            assert client.chat.completions


def main() -> None:
    """Load the function and play, or describe it, or send its tasks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--function", required=True)
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--tasks", action="store_true")
    parser.add_argument("--hang-seconds", type=float, default=10.0)
    parser.add_argument("--parent", type=int)
    arguments = parser.parse_args()
    if arguments.describe:
        output, sys.stdout = sys.stdout, sys.stderr  # keep what the file prints out of the description
        print(json.dumps(_description(arguments.function, json.load(sys.stdin))), file=output)
        return
    requests, answers = worker_protocol.become_worker(arguments.parent)
    if arguments.tasks:
        _send_tasks(arguments.function, requests, answers)
        return
    function = Function(arguments.function)
    asyncio.run(warm_up())
    asyncio.run(Player(function, answers, arguments.hang_seconds).run(requests))


def _description(source: str, parameters: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return what an environment is, and which of the tables of parameters it refuses."""
    try:
        function = Function(source)
    except (FileError, Refused) as error:
        return {"error": str(error)}
    refused = []
    for table, values in parameters.items():
        try:
            function.check(values)
        except InvalidParameter as error:
            refused.append(f"{table}.parameters.{error.key}: got {error.came}; allowed: {error.allowed}")
    return {**function.description(), "refused": refused}


def _send_tasks(source: str, requests: BinaryIO, answers: BinaryIO) -> None:
    def send(message: dict[str, Any]) -> None:
        answers.write(worker_protocol.pack(message))
        answers.flush()

    function = Function(source)
    send({"event": "ready"})
    request = worker_protocol.unpack(requests.readline())
    try:
        tasks = function.tasks(function.check(request["parameters"]))
        for number, task in enumerate(itertools.islice(tasks, request["limit"] or None)):
            if not isinstance(task, dict):
                raise Refused(f"task {number} of '{source}' is a {type(task).__name__}; allowed: a dict")
            try:
                check_values(task)
                size = len(json.dumps(task))
                if size > LARGEST_TASK:
                    raise ValueError(f"it has {size} bytes; allowed: at most {LARGEST_TASK}")
                send({"event": "task", "task": task})
            except (TypeError, ValueError) as error:
                raise Refused(f"task {number} of '{source}' cannot be sent: {error}") from error
        send({"event": "end"})
    except InvalidParameter as error:
        send({"event": "refused", "key": error.key, "came": error.came, "allowed": error.allowed})
    except Refused as error:
        send(failures.failed(str(error), retryable=False))
    except BaseException as error:
        send(failures.of_exception(source, function.file, error))


if __name__ == "__main__":
    main()
