"""The page in a real browser, drawn of hostile text."""

import subprocess
import sys
from contextlib import ExitStack

import pytest
from headless_chromium import CHROMIUM, chromium
from quartet.v1 import broker_pb2 as pb
from real_broker import Life

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; Debian's package is chromium")
ATTACK = "</p></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@in_browser
def test_the_page_is_drawn_escaped(addresses, nowhere):
    life = Life(addresses["broker"], "demo")
    for step in range(29):
        metrics = {"reward/mean": step / 30, "time/step": 1.0, "time/training": 1.0, "staleness/mean": 0.0}
        life.report(step=pb.StepFinished(step=step, policy_version=step + 1, metrics=metrics))
    life.attack(ATTACK, 29)
    life.report(weights=pb.WeightsPublished(policy_version=30, group_epoch=1, rollouts=1, bytes=10))
    settings = [f'--set=addresses.{kind}="{at}"' for kind, at in {**addresses, "trainer": nowhere}.items()]
    command = [sys.executable, "-m", "quartet_client", "dashboard", "--port", "0", "--no-open", "--run", "demo"]
    with subprocess.Popen([*command, *settings], stdout=subprocess.PIPE, text=True) as process, ExitStack() as ending:
        ending.callback(process.terminate)
        page = ending.enter_context(chromium())
        address = process.stdout.readline().split()[-1]
        page.open(address)
        page.until("document.querySelector('#chart-reward svg[role=img]') && document.querySelector('#sample article')")
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
