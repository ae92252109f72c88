"""The world of a test: see `world.py`."""

from collections.abc import AsyncIterator

import pytest
from doubles import InTestBroker
from world import World, neighbors


@pytest.fixture
async def world(tmp_path) -> AsyncIterator[World]:
    broker = InTestBroker()
    broker.create_run()
    async with neighbors(tmp_path, broker) as make:
        made = make()
        made.engine.policy_version = 0
        yield made


@pytest.fixture
async def ready(world) -> World:
    await world.ready()
    return world
