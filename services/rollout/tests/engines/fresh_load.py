"""Greedy completions of an engine that has just loaded a folder, from a process of its own (a process holds one vLLM).

`python fresh_load.py ENGINE OPTIONS FOLDER PROMPTS LENGTH`, with OPTIONS and PROMPTS in JSON, prints one JSON line:
[[tokens, log-probs], …].
"""

from __future__ import annotations

import asyncio
import json
import sys

from quartet_rollout.engines import SamplingSettings, create_engine


async def main(name: str, options: str, folder: str, prompts: str, length: str) -> None:
    engine = create_engine(name, folder, json.loads(options))
    await engine.start()
    sampling = SamplingSettings(temperature=0.0, max_new_tokens=int(length))
    completions = []
    for i, prompt in enumerate(json.loads(prompts)):
        async for completion in engine.generate(str(i), prompt, 1, sampling):
            completions.append([completion.token_ids.tolist(), completion.log_probs.tolist()])
    await engine.close()
    print(json.dumps(completions))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
