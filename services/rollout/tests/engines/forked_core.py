"""A process that forks an engine core as the rollout does: `python forked_core.py FOLDER work|wait`.

It says the id of the fork, and with "work" gives it work that writes what it sees to FOLDER/seen and then waits.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from pathlib import Path

import vllm.v1.engine.utils

from quartet_rollout.engines.options import VllmOptions
from quartet_rollout.engines.registry import prepare_engine

FOREVER = 600


def report(folder: str) -> None:
    seen = {
        "pid": os.getpid(),
        "group": os.getpgrp(),
        "variables": dict(os.environ),
        "imported": "vllm.v1.worker.cpu_worker" in sys.modules,
        "name": multiprocessing.current_process().name,
    }
    Path(folder, "part").write_text(json.dumps(seen))
    Path(folder, "part").rename(Path(folder, "seen"))
    time.sleep(FOREVER)


def main(folder: str, what: str) -> None:
    prepare_engine("vllm", folder, VllmOptions())
    os.environ["SET_SINCE"] = "the fork"
    said: dict[str, object] = {"forks": [child.pid for child in multiprocessing.active_children()]}
    if what == "work":
        context = vllm.v1.engine.utils.get_mp_context()
        first = context.Process(target=report, name="EngineCore", kwargs={"folder": folder})
        first.start()
        said |= {"first": first.pid}
    print(json.dumps(said), flush=True)
    time.sleep(FOREVER)


if __name__ == "__main__":
    main(*sys.argv[1:])
