"""The page in a real browser: drawn, safe, readable, steered by keys, live across an outage."""

import json
import subprocess
import sys
import time
from urllib.request import urlopen

import pytest
from headless_chromium import CHROMIUM, chromium
from quartet.v1 import broker_pb2
from small_services import SmallServices, hostile_sample

from quartet_client import Client

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; Debian's package is chromium")
ATTACK = "</p></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def page_of(nowhere):
    """Start `quartet dashboard` with the given arguments; return its address. It is gone after the test."""
    started: list[subprocess.Popen] = []

    def start(*arguments: str) -> str:
        command = [sys.executable, "-m", "quartet_client", "dashboard", "--port", "0", "--no-open", "--until-eof"]
        process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        line = process.stdout.readline()
        assert line.startswith("dashboard at http://127.0.0.1:"), line
        return line.split()[-1]

    def end() -> None:
        while started:
            process = started.pop()
            process.stdin.close()  # as a parent that is gone leaves it
            assert process.wait(timeout=30) == 0
            process.stdout.close()

    start.end = end
    yield start
    end()


def _attacking_events():
    metrics = {"reward/mean": 0.5, "reward/ans_acc": 0.5, "time/step": 1.0, "time/training": 1.0, "staleness/mean": 0.0}
    for step in range(30):
        told = broker_pb2.StepFinished(step=step, policy_version=step + 1, metrics=metrics | {"reward/mean": step / 30})
        yield broker_pb2.RunEvent(step=told)
    yield hostile_sample(ATTACK, "long" * 900, count=8)
    yield broker_pb2.RunEvent(notice=broker_pb2.Notice(level=ATTACK, text=ATTACK, source=ATTACK))
    weights = broker_pb2.WeightsPublished(policy_version=30, group_epoch=1, rollouts=1, bytes=10)
    yield broker_pb2.RunEvent(weights=weights)


@in_browser
def test_the_page_is_drawn_escaped_and_fits_a_phone_and_keys_steer_it(page_of, nowhere):
    with SmallServices() as services:
        with Client(services.addresses["broker"]) as client:
            client.create_run("attacked")
        for event in _attacking_events():
            services.call(services.broker.add_event, "attacked", event)
        addresses = {**services.addresses, "trainer": nowhere}
        settings = [part for kind, at in addresses.items() for part in ("--set", f'addresses.{kind}="{at}"')]
        address = page_of("--run", "attacked", *settings)
        with chromium() as page:
            page.look(1280, 800)
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
            # What is drawn can be read without seeing it.
            named = "[...document.querySelectorAll('svg[role=img]')].every((each) => each.getAttribute('aria-label'))"
            assert page.evaluate(named)
            label = page.evaluate("document.querySelector('#chart-reward svg[role=img]').getAttribute('aria-label')")
            assert label.startswith("Reward, mean of a step's completions, over optimizer steps. smoothed: from ")
            page.evaluate("document.querySelector('#chart-reward svg[role=img]').focus()")
            page.press("Home")
            page.press("ArrowRight")
            page.until(
                "document.querySelector('#chart-reward [aria-live]').textContent.startsWith('2: each step 0.03')"
            )
            stops = []
            page.evaluate("document.activeElement.blur()")
            for _ in range(40):
                page.press("Tab")
                stops.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
            assert any(each.startswith("Values as a table") for each in stops)
            assert {"follow", "wrong"} < set(stops)

            for width, height, scheme in (
                (1280, 800, "dark"),
                (800, 600, "light"),
                (390, 844, "dark"),
                (320, 640, "light"),
            ):
                page.look(width, height, scheme)
                page.until("document.querySelector('#chart-reward svg[role=img]').viewBox.baseVal.width < innerWidth")
                wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                assert wide <= 0, f"{wide} pixels too wide at {width}"
            assert not [each for each in page.told if "Uncaught" in each or '"level": "error"' in each], page.told

            # Were there a hole, the policy would still shut it: markup cannot be made from a string.
            hole = "try { document.body.innerHTML = '<b>x</b>'; 'open' } catch (error) { error.name }"
            assert page.evaluate(hole) == "TypeError"

            page_of.end()
            page.until("document.getElementById('word').textContent === 'This page is cut off'")


def test_a_broker_that_comes_back_is_followed_on(page_of, nowhere):
    address = page_of("--broker", nowhere, "--run", "back")

    def until(true_of) -> dict:
        deadline, told = time.monotonic() + 60, {}
        while not true_of(told):
            assert time.monotonic() < deadline, json.dumps(told)[:3000]
            with urlopen(f"{address}api/state", timeout=10) as answer:
                told = json.load(answer)
            time.sleep(0.1)
        return told

    for step in range(2):  # a broker comes, with a step more, and goes
        until(lambda told: told and told["verdict"]["word"] == "Broker away")
        with SmallServices(broker=nowhere) as services:
            with Client(services.addresses["broker"]) as client:
                client.create_run("back")
            for each in range(step + 1):
                told = broker_pb2.StepFinished(step=each, policy_version=each + 1, metrics={"reward/mean": 0.5})
                services.call(services.broker.add_event, "back", broker_pb2.RunEvent(step=told))
            state = until(lambda told, wanted=step + 1: told and told["run"]["steps_done"] == wanted)
            assert not state["broker_away"]
