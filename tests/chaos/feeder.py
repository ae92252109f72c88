"""Submits a run's prompts as `quartet run` does, until it ends: the client's own code, in a process that can be killed.

`python feeder.py RUN_FILE BROKER...`: it uses one of the brokers, chosen by its process id. Each start submits from the
first prompt; the broker ignores those it has.
"""

import asyncio
import os
import sys
from pathlib import Path

from membership import emit

from quartet_client.async_client import AsyncClient
from quartet_client.data import DataSection
from quartet_client.feed import keep_fed
from quartet_common.config import load_config


async def main(path: Path, *brokers: str) -> None:
    broker = brokers[os.getpid() % len(brokers)]
    config = load_config("data", DataSection, path)
    emit("ready")
    async with AsyncClient(broker, security=config.security, timeout=3.0) as client:
        report = await keep_fed(config, client, asyncio.Event(), look_seconds=1.0)
    emit("fed", new=report.submitted, known=report.known, ended_by=report.ended_by)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
