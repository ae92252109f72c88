"""`quartet top`: one look at small services."""

import json

import pytest
from quartet.v1 import broker_pb2

from quartet_client.cli import main


@pytest.fixture
def top(services, capsys, nowhere):
    services.call(services.broker.CreateRun, broker_pb2.CreateRunRequest(spec=broker_pb2.RunSpec(run_id="demo")), None)

    def _top(*options: str, **addresses: str) -> tuple[int, str]:
        known = {"trainer": nowhere, **services.addresses, **addresses}
        sets = [f'--set=addresses.{kind}="{address}"' for kind, address in known.items()]
        status = main(["top", "--run", "demo", *options, *sets])
        return status, capsys.readouterr().out

    return _top


def test_one_look_tells_services_queues_and_members(top, services):
    status, out = top("--json")
    told = json.loads(out)
    assert status == (0 if "trainer" in services.addresses else 1)
    assert (told["run_id"], told["state"]) == ("demo", "active")
    assert told["queues"].keys() >= {"queued", "ready", "stale", "dead"}
    assert [service["kind"] for service in told["services"]] == ["broker", "reward", "rollout", "trainer"]
    assert {service["health"] for service in told["services"][:3]} == {"serving"}
    _, shown = top("--once")
    assert "run demo: active" in shown and "engine echo" in shown and "queues" in shown


def test_a_service_that_is_away_is_one_red_row_and_exit_status_1(top, nowhere):
    status, out = top("--once", rollout=nowhere, trainer=nowhere)
    assert status == 1
    assert out.count("unreachable") == 2 and "engine echo" not in out and "verifiers exact" in out


def test_a_run_that_the_broker_does_not_know_is_told_so(services, capsys, nowhere):
    sets = [f'--set=addresses.{kind}="{nowhere}"' for kind in ("broker", "reward", "rollout", "trainer")]
    assert main(["top", "--once", "--run", "other", *sets]) == 1
    assert "run other: not known to the broker" in capsys.readouterr().out
