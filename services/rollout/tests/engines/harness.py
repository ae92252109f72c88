"""What the contract tests share: an engine with its reference, and the process that sends weights."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import read_weights
from packing import checksum, pack
from transformers import AutoModelForCausalLM

from quartet_rollout.engines import Engine, EngineCompletion, SamplingSettings, WeightGroupInfo

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[3] / "tests" / "preloaded"))
from started import Answering  # noqa: E402 (beside the other suites' tests)

FORMS = ["transformers-untied", "vllm-tied", "vllm-untied", "transformers-tied"]
"""Each engine, and of each engine both kinds of embeddings; the first two for what does not depend on these."""
BUCKET_BYTES = 200_000  # Several buckets for the tiny model, one tensor larger than none of them.
PATIENCE = 240.0
"""Seconds before a test counts as hanging: generous, since machines that run tests are busy."""
PROMPT = [18, 11, 19, 11, 17, 29, 31]
PROMPTS = [PROMPT, [5, 6, 7], [40] * 30]


class Sender(Answering):
    """The process of sender.py."""

    def __init__(self, log: Path) -> None:
        super().__init__([sys.executable, HERE / "sender.py"], log)
        self._member: int = self.hear()["pid"]

    def open(self, world_size: int = 2, timeout: float = PATIENCE) -> WeightGroupInfo:
        """Open a group of a new epoch; returns where to join as rank 1."""
        epoch, secret = secrets.randbelow(2**31), secrets.token_bytes(16)
        opened = self.order(do="open", epoch=epoch, secret=secret.hex(), world_size=world_size, timeout=timeout)
        return WeightGroupInfo("gloo", "127.0.0.1", opened["port"], 1, world_size, timeout, secret, epoch)

    def send(self, folder: Path) -> None:
        self.give(do="send", folder=str(folder), bucket_bytes=BUCKET_BYTES)

    def kill_member(self) -> None:
        """Kill the process that is in the group; another takes over, which is in none."""
        os.kill(self._member, signal.SIGKILL)
        while "pid" not in (answer := self.hear()):
            pass  # What the last one said yet.
        self._member = answer["pid"]


class Harness:
    """An engine, the folder whose weights it has, and short words for what tests do with it."""

    def __init__(
        self, engine: Engine, options: dict, folders: tuple[Path, Path], run: Callable[..., Any], sender: Sender
    ) -> None:
        self.engine, self.options, self.folders, self.sender = engine, options, folders, sender
        self._run = run
        self._installed: Path | None = folders[0]
        self._references: dict[Path, Any] = {}
        self._in_group = False
        self.fresh = [self.generate(prompt, temperature=0.0, max_new_tokens=40)[0] for prompt in PROMPTS]
        """Greedy completions of the first folder's weights, as they were loaded."""

    def run(self, coroutine: Any) -> Any:
        """Run with a deadline: a hanging engine must fail, not hang the tests."""
        return self._run(asyncio.wait_for(coroutine, PATIENCE))

    # ------------------------------------------------------------ generation

    async def collect(self, prompt: list[int], n: int, sampling: SamplingSettings) -> list[EngineCompletion]:
        """All completions, by index."""
        stream = self.engine.generate("a request", prompt, n, sampling)
        completions = [completion async for completion in stream]
        return sorted(completions, key=lambda completion: completion.index)

    def generate(self, prompt: list[int] = PROMPT, n: int = 1, **sampling: Any) -> list[EngineCompletion]:
        return self.run(self.collect(prompt, n, SamplingSettings(**sampling)))

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.002)

    async def started(self, tokens: int) -> None:
        """Wait until this many more tokens have been generated and no completion waits for its first."""
        target = self.engine.stats().tokens_total + tokens
        await self.until(lambda: (now := self.engine.stats()).tokens_total >= target and not now.waiting)

    # --------------------------------------------------------------- weights

    async def join(self) -> None:
        await self.engine.join_weight_group(self.sender.open())
        assert self.sender.hear() == {"joined": True}
        self._in_group = True

    async def receive(self, folder: Path) -> None:
        if not self._in_group:
            await self.join()
        manifest, buckets = pack(read_weights(folder), BUCKET_BYTES)
        self.sender.send(folder)
        came = await self.engine.receive_weights(manifest, PATIENCE)
        assert self.sender.hear() == {"sent": len(buckets)}
        assert (len(came), came[-1]) == (len(buckets), checksum(buckets))
        self._installed = None

    async def update(self, folder: Path, version: int, keep_kv_cache: bool = False) -> None:
        """A whole update in flight."""
        await self.engine.pause("keep", keep_kv_cache)
        running = self.engine.stats().running
        await self.receive(folder)
        await self.engine.install_weights(version)
        # The heartbeat of a new version goes out just then, and a gauge of 0 would say that nothing is done.
        assert self.engine.stats().running == running
        await self.engine.resume()
        self._installed = folder

    def reset(self) -> None:
        """Version 0: the weights of the first folder."""
        if self._installed != self.folders[0] or self.engine.policy_version != 0:
            self.run(self.update(self.folders[0], 0))

    def left_group(self) -> None:
        """The test has broken the group: the next update joins another."""
        self._in_group = False

    def check_idle(self) -> None:
        async def idle() -> None:
            await self.engine.resume()
            await self.until(lambda: self.engine.stats().running + self.engine.stats().waiting == 0)

        self.run(idle())

    # ------------------------------------------------------------- reference

    def reference(self, folder: Path) -> Any:
        """The folder's model, by plain transformers."""
        if folder not in self._references:
            self._references[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return self._references[folder]

    def logits(self, folder: Path, prompt: list[int], output: np.ndarray) -> torch.Tensor:
        """What plain transformers says before each token of `output`: float32 [T, V]."""
        ids = torch.tensor([[*prompt, *output.tolist()]])
        with torch.no_grad():
            return self.reference(folder)(ids).logits[0, len(prompt) - 1 : -1].float()

    def log_probs(self, folder: Path, prompt: list[int], output: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-prob of each token of `output`, float32 [T]."""
        every = torch.log_softmax(self.logits(folder, prompt, output) / temperature, dim=-1)
        return every.gather(-1, torch.tensor(output, dtype=torch.int64)[:, None])[:, 0].numpy()

    def greedy(self, folder: Path, prompt: list[int], length: int) -> np.ndarray:
        """Plain transformers' greedy tokens, end of sequence ignored."""
        output: list[int] = []
        for _ in range(length):
            padded = np.array([*output, 0])
            output.append(int(self.logits(folder, prompt, padded)[-1].argmax()))
        return np.array(output, dtype=np.int32)
