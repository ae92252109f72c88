"""Feeds a run as `quartet run` does, until it ends: the client's own feeder, in a process that can be killed.

Each life begins with the first prompt again; the broker knows what it has. `python feeder.py RUN_FILE BROKER...`: it
talks to one of the brokers, in another life perhaps to another.
"""

import asyncio
import os
import sys
from pathlib import Path

from membership import tell

from quartet_client.async_client import AsyncClient
from quartet_client.data import DataSection
from quartet_client.feed import keep_fed
from quartet_common.config import load_config


async def main(path: Path, *brokers: str) -> None:
    broker = brokers[os.getpid() % len(brokers)]
    config = load_config("data", DataSection, path)
    tell("ready")
    async with AsyncClient(broker, security=config.security, timeout=3.0) as client:
        report = await keep_fed(config, client, asyncio.Event(), look_seconds=1.0)
    tell("fed", new=report.submitted, known=report.known, ended_by=report.ended_by)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *sys.argv[2:]))
