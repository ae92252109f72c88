"""The broker beside a plain-Python reference: whatever order things happen in, both agree on each answer and all books.

`model_reference.py` is the reference (its state: `model_books.py`), `model_run.py` makes each call to both,
`model_machine.py` says what may happen.

MODEL_STEPS sets how many rules are run at least; another MODEL_SEED runs other ones; with MODEL_SHRINK=1 a failure is
made smaller before it is shown, which takes minutes.
"""

import asyncio
import itertools
import os

import pytest
import redis
from conftest import serving
from frozen_redis import FrozenRedis, find_library
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from model_books import MAX_FIRST_DEAD
from model_machine import BrokerMachine
from model_run import Bench

from quartet_broker import scripts

STEPS = int(os.environ.get("MODEL_STEPS", "3000"))
SEED = int(os.environ.get("MODEL_SEED", "0"))
PHASES = [Phase.generate, Phase.shrink] if os.environ.get("MODEL_SHRINK") else [Phase.generate]


@pytest.fixture
def bench(tmp_path):
    """A broker over a Redis of its own, whose clock the test sets."""
    library = find_library()
    if library is None:
        pytest.skip("Redis' clock cannot be set: the libfaketime wheel is for Linux on x86-64")
    server = FrozenRedis(tmp_path, library)
    server.start()
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # gRPC wants one already where a call is made, before it is awaited
    # Swept by hand: the periodic sweep would come between a rule and its check.
    context = serving(server.url, sweeping=False, max_first_dead=MAX_FIRST_DEAD)
    stub, servicer, _ = loop.run_until_complete(context.__aenter__())
    with redis.Redis.from_url(server.url) as client:
        try:
            yield Bench(loop, stub, server, client, lambda run_id: servicer.store.run(scripts.SWEEP, run_id))
        finally:
            loop.run_until_complete(context.__aexit__(None, None, None))
            asyncio.set_event_loop(None)
            loop.close()
            server.kill()


@pytest.mark.slow
@pytest.mark.timeout(max(300, STEPS // 20))
def test_the_broker_agrees_with_a_plain_reference(bench):
    BrokerMachine.bench = bench
    chosen = settings(
        max_examples=5,
        stateful_step_count=100,
        phases=PHASES,
        deadline=None,
        derandomize=False,  # the seed decides; on CI hypothesis would otherwise draw the same examples each time
        suppress_health_check=list(HealthCheck),
        database=None,
        print_blob=False,
    )
    for number in itertools.count(SEED):
        run_state_machine_as_test(seed(number)(BrokerMachine), settings=chosen)
        if bench.steps >= STEPS:
            return
