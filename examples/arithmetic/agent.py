"""The demo's task as an agent's: it asks the policy through the OpenAI client, and scores the answer itself."""

import re

from quartet_environment import Endpoint, Reward, Task


async def play(task: Task, endpoint: Endpoint) -> Reward:
    """One sum; right is 1, and an answer in its tags 0.5 more."""
    prompt = task.messages[0]["content"]
    said = await endpoint.client.completions.create(model=endpoint.model, prompt=prompt, **task.sampling)
    found = re.search(r"<answer>\s*(-?\d+)\s*</answer>", said.choices[0].text)
    right = found is not None and found[1] == task.answer
    return Reward({"right": float(right), "form": (float(found is not None), 0.5)})
