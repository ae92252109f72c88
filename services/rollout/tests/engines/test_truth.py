"""Truth of weights: whatever updates and pauses come between, each token is of the version that its span names.

Every completion is computed again by plain transformers, span by span, with that span's weights. The short form makes a
few updates; QUARTET_TRUTH_UPDATES=50 makes the long one.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import numpy as np
import pytest
from harness import PATIENCE, Harness
from models import write_model

from quartet_rollout.engines import EngineCompletion, SamplingSettings

UPDATES = int(os.environ.get("QUARTET_TRUTH_UPDATES", "4"))
STREAMS = 4
FOLDERS = 4
TOLERANCE = 1e-4
pytestmark = pytest.mark.timeout((1 + UPDATES / 10) * PATIENCE)


@pytest.fixture
def folders(harness: Harness, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Weights of the versions, in turn; the engine begins with the first."""
    tied = "untied" not in harness.folders[0].name
    made = tmp_path_factory.mktemp("versions")
    return [
        harness.folders[0],
        *(write_model(made / str(seed), tied=tied, seed=seed) for seed in range(7, 6 + FOLDERS)),
    ]


async def generate_on(harness: Harness, ended: asyncio.Event, dice: random.Random, made: list[tuple]) -> None:
    """One prompt after the other until all updates are made; append (prompt, temperature, completion)."""
    while not ended.is_set():
        prompt = [dice.randrange(5, 90) for _ in range(dice.randrange(1, 20))]
        sampling = SamplingSettings(
            temperature=dice.choice([0.3, 1.0]), max_new_tokens=dice.randrange(20, 200), seed=dice.randrange(2**31)
        )
        completions = await harness.collect(prompt, dice.randrange(1, 4), sampling)
        made += [(prompt, sampling.temperature, completion) for completion in completions]


async def update(harness: Harness, folder: Path, version: int, dice: random.Random) -> None:
    """One update as the service makes it: received while tokens are generated, installed within a pause of any mode."""
    await harness.receive(folder)
    await harness.engine.pause(dice.choice(["keep", "keep", "keep", "wait", "abort"]))
    await asyncio.sleep(dice.uniform(0, 0.03))
    await harness.engine.install_weights(version)
    await asyncio.sleep(dice.uniform(0, 0.03))
    await harness.engine.resume()


def mismatched(harness: Harness, folders: list[Path], made: list[tuple[list[int], float, EngineCompletion]]) -> tuple:
    """Return the spans, and those whose log-probs are not the version's."""
    spans, wrong = [], []
    for prompt, temperature, completion in made:
        ends = 0
        for version, begin, end in completion.version_spans:
            assert begin == ends < end
            ends = end
            expected = harness.log_probs(folders[version % FOLDERS], prompt, completion.token_ids, temperature)
            off = float(np.abs(completion.log_probs[begin:end] - expected[begin:end]).max())
            spans.append(version)
            if off > TOLERANCE:
                wrong.append((version, begin, end, off))
        assert ends == len(completion.token_ids)
    return spans, wrong


def test_every_span_is_of_the_version_it_names(harness: Harness, folders: list[Path]) -> None:
    dice = random.Random(2)  # Of four updates two keep what runs, one aborts it, and one waits for it.

    made: list[tuple] = []

    async def body() -> None:
        ended, version = asyncio.Event(), 0
        streams = [
            asyncio.create_task(generate_on(harness, ended, random.Random(stream), made)) for stream in range(STREAMS)
        ]
        try:
            # Until one was carried over an update: on a busy host, all may end just before each of the first few.
            while version < UPDATES or all(len(each.version_spans) == 1 for *_, each in made):
                version += 1
                await harness.started(dice.randrange(1, 120))
                await update(harness, folders[version % FOLDERS], version, dice)
        finally:
            ended.set()
        await asyncio.gather(*streams)

    harness._run(asyncio.wait_for(body(), (1 + UPDATES / 10) * PATIENCE))
    spans, wrong = mismatched(harness, folders, made)
    print(f"{harness.engine.name}: {UPDATES} updates, {len(made)} completions, {len(spans)} spans, {len(wrong)} wrong")
    assert not wrong
    assert set(spans) >= set(range(1, UPDATES)), "a version made no token"
