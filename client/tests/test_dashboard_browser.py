"""The page in a real browser, drawn of hostile text."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from headless_chromium import CHROMIUM, chromium
from quartet.v1 import broker_pb2
from small_services import SmallServices, hostile_sample

from quartet_client import Client

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; Debian's package is chromium")
ATTACK = "</p></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def _attacking_events():
    metrics = {"reward/mean": 0.5, "reward/ans_acc": 0.5, "time/step": 1.0, "time/training": 1.0, "staleness/mean": 0.0}
    for step in range(30):
        told = broker_pb2.StepFinished(step=step, policy_version=step + 1, metrics=metrics | {"reward/mean": step / 30})
        yield broker_pb2.RunEvent(step=told)
    yield hostile_sample(ATTACK)
    yield broker_pb2.RunEvent(notice=broker_pb2.Notice(level=ATTACK, text=ATTACK, source=ATTACK))
    weights = broker_pb2.WeightsPublished(policy_version=30, group_epoch=1, rollouts=1, bytes=10)
    yield broker_pb2.RunEvent(weights=weights)


@contextmanager
def dashboard(services: SmallServices, trainer: str) -> Iterator[str]:
    """The address of `quartet dashboard` for the run."""
    addresses = {**services.addresses, "trainer": trainer}
    settings = [part for kind, at in addresses.items() for part in ("--set", f'addresses.{kind}="{at}"')]
    command = [sys.executable, "-m", "quartet_client", "dashboard", "--port", "0", "--no-open", "--run", "attacked"]
    with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@in_browser
def test_the_page_is_drawn_escaped(nowhere):
    with SmallServices() as services:
        with Client(services.addresses["broker"]) as client:
            client.create_run("attacked")
        for event in _attacking_events():
            services.call(services.broker.add_event, "attacked", event)
        with dashboard(services, nowhere) as address, chromium() as page:
            page.open(address)
            page.until(
                "document.querySelector('#chart-reward svg[role=img]') && document.querySelector('#sample article')"
            )
            page.until("document.getElementById('word').textContent === 'Running, but look'")

            # Nothing that a model or a service wrote is anything but text, and nothing was loaded from elsewhere.
            assert "owned" not in page.evaluate("document.title")
            assert page.evaluate("document.querySelectorAll('img, iframe, body script').length") == 0
            assert page.evaluate("document.querySelector('.said.thought').textContent") == ATTACK
            assert page.evaluate("document.getElementById('failures').textContent").count(ATTACK) == 3
            origins = "[...new Set(performance.getEntriesByType('resource').map((each) => new URL(each.name).origin))]"
            assert page.evaluate(origins) == [address.rstrip("/")]
            assert not [each for each in page.told if "Uncaught" in each or '"level": "error"' in each], page.told

            # Were there a hole, the policy would still shut it: markup cannot be made from a string.
            hole = "try { document.body.innerHTML = '<b>x</b>'; 'open' } catch (error) { error.name }"
            assert page.evaluate(hole) == "TypeError"
