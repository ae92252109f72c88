"""A tool for the demo's model, through the OpenAI client: where it writes "=", a calculator writes what follows."""

import re

from quartet_environment import Endpoint, Task


def calculate(text: str) -> str:
    """Return the sum that a text ends with, e.g. "3" of "<think>2-1+2="; "?" if it ends with none."""
    terms = re.findall(r"[+-]?\d+", re.search(r"[-+\d]*=$", text)[0])
    return str(sum(map(int, terms))) if terms else "?"


async def play(task: Task, endpoint: Endpoint, *, most_calls: int = 6) -> float:
    """Ask until the policy has answered, or has used the calculator `most_calls` times."""
    question = task.messages[0]["content"]
    text = ""
    for _ in range(most_calls + 1):
        said = await endpoint.client.completions.create(
            model=endpoint.model,
            prompt=question + text,
            stop="=",
            extra_body={"include_stop_str_in_output": True},
            **task.sampling,
        )
        text += said.choices[0].text
        if not text.endswith("="):
            break
        text += calculate(text)
    found = re.search(r"<answer>(-?\d+)</answer>", text)
    return float(found is not None and found[1] == task.answer)
