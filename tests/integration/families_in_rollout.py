"""Run with the rollout's environment: `python families_in_rollout.py PROMPT FOLDER…` prints a line for each folder, in
JSON: the longest context of the transformers engine, and a completion that fills it: tokens, log-probs.
"""

import asyncio
import json
import sys

from quartet_rollout.engines import SamplingSettings, create_engine


async def main(prompt: str, *folders: str) -> None:
    for folder in folders:
        engine = create_engine("transformers", folder, {"device": "cpu"})
        await engine.start()
        sampling = SamplingSettings(max_new_tokens=1000, seed=1)
        async for made in engine.generate(folder, json.loads(prompt), 1, sampling):
            print(json.dumps([engine.max_model_len, made.token_ids.tolist(), made.log_probs.tolist()]), flush=True)
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
