"""Sums of the package reasoning-gym, scored by its own verifier. Any of its datasets can take their place."""

import hashlib
from collections.abc import Iterator
from typing import Any

import reasoning_gym
from reasoning_gym.utils import extract_answer

from quartet_environment import Endpoint, Task

DATASET = "chain_sum"


def tasks(held_out: bool = False, seed: int = 42) -> Iterator[dict[str, Any]]:
    """Yield the sums of four numbers from 1 to 5, which the demo's model can read; one in eight is held out."""
    for entry in reasoning_gym.create_dataset(DATASET, size=100_000, seed=seed, min_terms=4, max_terms=4, max_digits=1):
        problem = entry["metadata"]["expression"].replace(" ", "") + "=?"
        is_held_out = hashlib.sha256(problem.encode()).digest()[0] % 8 == 0
        if is_held_out == held_out and not set(problem) & set("06789"):
            yield {"problem": problem, "entry": entry}


async def play(task: Task, endpoint: Endpoint) -> float:
    """One answer, in its tags."""
    said = await endpoint.client.completions.create(model=endpoint.model, prompt=task.data["problem"], **task.sampling)
    answer = extract_answer(said.choices[0].text)
    return reasoning_gym.get_score_answer_fn(DATASET)(answer, task.data["entry"])
