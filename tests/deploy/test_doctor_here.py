"""`quartet doctor` with the real services' programs and a real Redis, on this host."""

import json
import subprocess
from pathlib import Path

import pytest

from quartet_common.ports import free_port
from quartet_local.process import find_server

ROOT = Path(__file__).resolve().parents[2]
QUARTET = ROOT / ".quartet" / "envs" / "client" / "bin" / "quartet"


def doctor(*arguments: str) -> tuple[int, dict[str, dict]]:
    done = subprocess.run(
        [QUARTET, "doctor", *arguments, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert done.stdout, done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)}


@pytest.fixture
def redis(tmp_path):
    port = free_port()
    command = [find_server(), "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert any("Ready to accept" in line for line in process.stdout), "Redis ended"
        yield f"redis://127.0.0.1:{port}/0"
        process.kill()


def test_a_broker_is_told_of_its_redis_and_python(redis):
    status, found = doctor("broker", "--set", f"broker.redis_url={redis}", "--set", "addresses.broker=127.0.0.1:0")
    assert status == 0
    assert {check for check, finding in found.items() if finding["state"] == "ok"} >= {
        "program",
        "Python",
        "preflight",
        "security",
    }
    assert redis.rsplit("/", 1)[0] in found["preflight"]["what"] and found["Python"]["what"].startswith("3.1")
    nobody = f"redis://127.0.0.1:{free_port()}/0"
    status, found = doctor("broker", "--set", f"broker.redis_url={nobody}", "--set", "addresses.broker=127.0.0.1:0")
    assert status == 1 and found["preflight"]["state"] == "failure" and nobody in found["preflight"]["what"]


def test_a_reward_service_is_told_how_safely_programs_would_run():
    status, found = doctor("reward", "--set", "addresses.reward=127.0.0.1:0")
    assert status == 0 and found["sandbox"]["state"] == "ok", found
    mode = found["sandbox"]["what"].removeprefix("programs run in the mode ")
    assert mode in ("namespaces+uid", "namespaces", "uid+landlock+seccomp")
    status, found = doctor(
        "reward", "--set", "addresses.reward=127.0.0.1:0", "--set", "reward.sandbox.minimum=nonsense"
    )
    assert status == 1 and "sandbox" not in found and "minimum" in found["preflight"]["what"]
