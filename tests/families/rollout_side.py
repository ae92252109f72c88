"""The rollout's half: an engine generates, and installs new weights during generation."""

from __future__ import annotations

import asyncio
from typing import Any

from quartet.v1 import rollout_pb2
from sides import answer_orders

from quartet_rollout.engines import Engine, EngineCompletion, SamplingSettings, WeightGroupInfo, create_engine

OPTIONS: dict[str, dict[str, Any]] = {
    "vllm": {"kv_cache_gib": 0.03125, "max_num_seqs": 16, "max_num_batched_tokens": 1024, "max_model_len": 256},
    "transformers": {"device": "cpu", "max_num_seqs": 16},
}
PROMPTS = ([18, 11, 19, 11, 17, 29, 31], [5, 6, 7, 80])
GROUP = 3
BEFORE, RUNNING, AFTER = (24, 24), (220, 170), (24, 24)
"""Lengths of the completions by prompt: of the training batch, of those during an update (of different lengths), and of
those after it."""
NO_MEETING = WeightGroupInfo("file", "", 0, 1, 2, 60.0, b"", 1)
SECONDS = 240.0


class Side:
    """One engine at a time."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._engine: Engine
        self._count = 0

    def answer(self, do: str, **order: Any) -> Any:
        return self._runner.run(asyncio.wait_for(getattr(self, do)(**order), SECONDS))

    async def start(self, engine: str, folder: str, lengths: tuple[int, int] = BEFORE) -> list[dict]:
        """Start the engine with a model, and return groups of completions of these lengths, if the context permits."""
        self._engine = create_engine(engine, folder, OPTIONS[engine])
        await self._engine.start()
        await self._engine.set_version(0)
        return await self._groups(lengths)

    async def update(self, manifest: str, folder: str) -> dict:
        """Install a folder's weights during generation. Returns {"met": groups generated during the update,
        "after": groups begun after it}."""
        engine, installed = self._engine, asyncio.Event()
        begun = 0  # tokens generated when the newest group began

        async def last(prompt: list[int], length: int) -> dict:
            """Return the group that was generated during the update."""
            nonlocal begun
            while True:
                begun = engine.stats().tokens_total
                group = await self._group(prompt, length)
                if installed.is_set():
                    return group

        met = asyncio.gather(*map(last, PROMPTS, RUNNING))
        await asyncio.sleep(0)  # both begin
        while engine.stats().tokens_total < begun + GROUP * len(PROMPTS) * 4:
            await asyncio.sleep(0.001)
        await engine.pause("keep")
        await engine.join_weight_group(NO_MEETING)
        await engine.receive_weights(rollout_pb2.WeightManifest.FromString(bytes.fromhex(manifest)), SECONDS, folder)
        await engine.install_weights(1)
        installed.set()
        await engine.resume()
        return {"met": await met, "after": await self._groups(AFTER)}

    async def stop(self) -> None:
        await self._engine.close()

    async def _groups(self, lengths: tuple[int, int]) -> list[dict]:
        return await asyncio.gather(*map(self._group, PROMPTS, lengths))

    async def _group(self, prompt: list[int], length: int) -> dict:
        self._count += 1
        routed = "routed_experts" in self._engine.capabilities()
        sampling = SamplingSettings(max_new_tokens=length, seed=self._count, routed_experts=routed, stop_token_ids=())
        stream = self._engine.generate(str(self._count), prompt, GROUP, sampling)
        return {"prompt": prompt, "completions": [shown(completion) async for completion in stream]}


def shown(completion: EngineCompletion) -> dict:
    return {
        "tokens": completion.token_ids.tolist(),
        "log_probs": completion.log_probs.tolist(),
        "spans": completion.version_spans,
        "experts": None if completion.routed_experts is None else completion.routed_experts.tolist(),
    }


if __name__ == "__main__":
    answer_orders(Side().answer)
