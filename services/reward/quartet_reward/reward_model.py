"""Texts of many items become batches of the reward model; runs have their places in a batch in turn.

A batch leaves when it is full, or `wait_seconds` after its first text came. An item that was given up before its batch
left is not in it; a batch that runs is not killed for one item's sake, for the others wait for it, and it ends soon.
"""

import asyncio
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from quartet_common.log import get_logger
from quartet_reward import metrics
from quartet_reward.config import RewardModelSection
from quartet_reward.errors import ShuttingDown, VerifierCrashed, VerifierFailure
from quartet_reward.queue import CURRENT_RUN, count_wait
from quartet_reward.workers.pool import TaskTimedOut, WorkerCommand, WorkerDied, WorkerPool

log = get_logger(__name__)

# Characters of one message to the worker, far under the largest frame however they are escaped.
_MOST_CHARACTERS = 2 << 20


@dataclass(frozen=True, slots=True)
class Reading:
    """What the model said of a text."""

    logits: tuple[float, ...]
    tokens: int
    """Tokens that were read."""
    cut: int
    """Tokens at the beginning that were not."""


@dataclass(eq=False, slots=True)
class _Entry:
    text: str
    reading: "asyncio.Future[Reading]"
    arrived: float
    waited: float = 0.0
    """Seconds until its batch left."""


class RewardModel:
    """The model as verifiers see it."""

    def __init__(self, pool: WorkerPool, section: RewardModelSection):
        """`pool` is started and closed with this object."""
        self._pool = pool
        self._section = section
        self._runs: OrderedDict[str, deque[_Entry]] = OrderedDict()
        self._batch: list[_Entry] = []
        self._waiting = 0
        self._came = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task | None = None

    @property
    def template(self) -> str:
        return self._section.template

    @property
    def pids(self) -> frozenset[int]:
        return self._pool.pids

    def start(self) -> None:
        """Begin to load the model; texts may come at once and wait for it."""
        self._pool.start()
        self._task = asyncio.create_task(self._work(), name="reward model")

    async def close(self) -> None:
        """Kill the process; who waits has a Failure."""
        self._closed = True
        await self._pool.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for entries in (self._batch, *self._runs.values()):
            _fail(entries, ShuttingDown())
        self._runs.clear()

    async def read(self, text: str) -> Reading:
        """Have a text read. Raises VerifierFailure: the process died twice or was too slow; or the service ends."""
        if self._closed:
            raise ShuttingDown
        entry = _Entry(text[-_MOST_CHARACTERS:], asyncio.get_running_loop().create_future(), time.monotonic())
        self._runs.setdefault(CURRENT_RUN.get(), deque()).append(entry)
        self._count(1)
        self._came.set()
        try:
            return await entry.reading
        finally:
            count_wait(entry.waited)

    async def _work(self) -> None:
        while True:
            await self._came.wait()
            if self._waiting < self._section.batch:
                await asyncio.sleep(self._section.wait_seconds)
            self._batch = self._next_batch()
            if not self._runs:
                self._came.clear()
            if self._batch:
                await self._read_batch(self._batch)

    def _next_batch(self) -> list[_Entry]:
        """Take one text of each run in turn until the batch is full."""
        batch: list[_Entry] = []
        characters = 0
        while self._runs and len(batch) < self._section.batch:
            run, entries = self._runs.popitem(last=False)
            entry = entries[0]
            if not entry.reading.done():
                characters += len(entry.text)
                if batch and characters > _MOST_CHARACTERS:
                    self._runs[run] = entries
                    self._runs.move_to_end(run, last=False)
                    break
                batch.append(entry)
            entries.popleft()
            self._count(-1)
            if entries:
                self._runs[run] = entries  # behind the others
        return batch

    async def _read_batch(self, batch: list[_Entry]) -> None:
        """Have texts read. Where that fails, the halves are read by themselves, so that a text fails alone."""
        for entry in batch:
            entry.waited = time.monotonic() - entry.arrived
        metrics.REWARD_MODEL_BATCH.observe(len(batch))
        try:
            reply = await self._pool.run({"texts": [entry.text for entry in batch]})
        except ShuttingDown as error:
            _fail(batch, error)
            return
        except (WorkerDied, TaskTimedOut) as error:
            problem = f"the reward model's process: {error}"
            log.warning("%s (%d texts)", problem, len(batch))
        else:
            if reply["event"] == "done":
                _answer(batch, reply)
                return
            problem = f"the reward model failed: {reply.get('reason', 'no reason given')}"
        if len(batch) == 1:
            _fail(batch, VerifierCrashed(problem))
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            await self._read_batch(half)

    def _count(self, change: int) -> None:
        self._waiting += change
        metrics.QUEUE_DEPTH.labels("reward_model_texts", "waiting").set(self._waiting)


def _answer(batch: list[_Entry], message: dict) -> None:
    for entry, logits, tokens, cut in zip(batch, message["logits"], message["tokens"], message["cut"], strict=True):
        if not entry.reading.done():
            entry.reading.set_result(Reading(tuple(logits), tokens, cut))


def _fail(entries: Iterable["_Entry"], failure: VerifierFailure) -> None:
    for entry in entries:
        if not entry.reading.done():
            entry.reading.set_exception(failure)


# What torch and CUDA read of the environment, beside what every worker sees.
_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES")


def model_pool(section: RewardModelSection, queue_seconds: float) -> WorkerPool:
    """Return the pool of the one process that has the model. `queue_seconds`: longest wait for it, loading included."""
    variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    # It reads what is in its folder and nothing else.
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(section.threads)}
    arguments = [f"--section={section.model_dump_json()}"]
    command = WorkerCommand("quartet_reward.workers.reward_model", arguments, variables, section.start_seconds)
    return WorkerPool("reward_model", command, section.deadline_seconds, queue_seconds)
