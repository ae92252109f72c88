"""Batches the texts of many items for the reward model's worker process; runs take turns at the places of a batch.

A batch is sent when it is full, or `wait_seconds` after its first text. Texts cancelled before that are left out;
cancelling one later does not stop the batch.
"""

import asyncio
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from quartet_common.log import get_logger
from quartet_common.text import error_text
from quartet_reward import metrics
from quartet_reward.begun import admitted
from quartet_reward.config import RewardModelSection
from quartet_reward.errors import ShuttingDown, VerifierCrashed, VerifierFailure
from quartet_reward.queue import FairQueue, count_wait
from quartet_reward.workers.pool import NoFreeWorker, TaskTimedOut, WorkerPool
from quartet_server.worker_process import WorkerCommand, WorkerDied

log = get_logger(__name__)

_MOST_CHARACTERS = 2 << 20  # of one message to the worker
# Environment variables for torch and CUDA, beside those that every worker inherits.
_VARIABLES = ("HOME", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True)
class Reading:
    """The model's result for a text."""

    logits: tuple[float, ...]
    tokens: int
    """Tokens that were read."""
    cut: int
    """Tokens that were cut from the beginning."""


@dataclass(eq=False, slots=True)
class _Entry:
    text: str
    reading: "asyncio.Future[Reading]"
    joined: float
    sent: float
    """When its batch was sent."""


class RewardModel:
    """The model as verifiers see it."""

    def __init__(self, section: RewardModelSection, queue_seconds: float):
        """`queue_seconds`: longest wait of a batch for the process, loading included."""
        self._section = section
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        # It must not download anything.
        variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(section.threads)}
        arguments = [f"--section={section.model_dump_json()}"]
        command = WorkerCommand("quartet_reward.workers.reward_model", arguments, variables, section.start_seconds)
        self.pool = WorkerPool("reward_model", command, section.deadline_seconds, queue_seconds)
        self.ready = self.pool.ready
        self._places: FairQueue[int] = FairQueue("reward_model_texts")
        self._places.add(*range(section.batch))
        self._next: asyncio.Queue[_Entry] = asyncio.Queue()
        """Texts that have a place and wait for their batch to be sent."""
        self._task: asyncio.Task | None = None

    @property
    def template(self) -> str:
        return self._section.template

    @property
    def waiting(self) -> int:
        """Texts without a place."""
        return self._places.waiting

    def start(self) -> None:
        """Start to load the model; `read` may be called at once."""
        self.pool.start()
        self._task = asyncio.create_task(self._work(), name="reward model")

    async def close(self) -> None:
        """Kill the process; waiting calls of `read` raise ShuttingDown."""
        self._places.close()
        await self.pool.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        _fail(self._taken(), ShuttingDown())

    async def read(self, text: str) -> Reading:
        """Run the model on a text. Raises VerifierFailure: the process died twice or was too slow, or shutdown."""
        await admitted()
        place = await self._places.acquire()
        now = time.monotonic()
        entry = _Entry(text[-_MOST_CHARACTERS:], asyncio.get_running_loop().create_future(), now, now)
        self._next.put_nowait(entry)
        try:
            return await entry.reading
        finally:
            self._places.release(place)
            count_wait(entry.sent - entry.joined)

    async def _work(self) -> None:
        while True:
            batch = [await self._next.get()]
            try:
                if self._next.qsize() + 1 < self._section.batch:
                    await asyncio.sleep(self._section.wait_seconds)
                batch = [entry for entry in (*batch, *self._taken()) if not entry.reading.done()]
                for entry in batch:
                    entry.sent = time.monotonic()
                if batch:
                    await self._read_batch(batch)
            except Exception as error:  # e.g. an answer without logits
                log.exception("a batch of the reward model failed")
                _fail(batch, VerifierCrashed(f"the reward model failed: {error_text(error)}"))
            finally:
                _fail(batch, ShuttingDown())  # those without a result when this task is cancelled

    def _taken(self) -> list[_Entry]:
        return [self._next.get_nowait() for _ in range(self._next.qsize())]

    async def _read_batch(self, batch: list[_Entry]) -> None:
        """Run the model on a batch. If that fails, the halves are retried, so that a bad text fails alone."""
        if len(batch) > 1 and sum(len(entry.text) for entry in batch) > _MOST_CHARACTERS:
            await self._read_halves(batch)
            return
        metrics.REWARD_MODEL_BATCH.observe(len(batch))
        try:
            reply = await self.pool.run({"texts": [entry.text for entry in batch]})
        except ShuttingDown as error:
            _fail(batch, error)
            return
        except NoFreeWorker as error:
            _fail(batch, VerifierCrashed(f"the reward model's process: {error}"))
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
        await self._read_halves(batch)

    async def _read_halves(self, batch: list[_Entry]) -> None:
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            await self._read_batch(half)


def _answer(batch: list[_Entry], message: dict) -> None:
    for entry, logits, tokens, cut in zip(batch, message["logits"], message["tokens"], message["cut"], strict=True):
        if not entry.reading.done():
            entry.reading.set_result(Reading(tuple(logits), tokens, cut))


def _fail(entries: Iterable["_Entry"], failure: VerifierFailure) -> None:
    for entry in entries:
        if not entry.reading.done():
            entry.reading.set_exception(failure)
