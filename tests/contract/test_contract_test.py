"""`quartet contract-test`, as whoever installed the client has it: right services pass, a wrong one is told why not."""

import re
import subprocess
from pathlib import Path

import grpc
import pytest
import wrong_reward
from contract_stack import ENGINES
from servers_under_test import ENVIRONMENTS

from quartet_client.authority import create_authority, issue
from quartet_contract.world import World

COMMAND = ENVIRONMENTS / "client" / "bin" / "quartet"


def contract_test(kind: str, address: str, *options: str) -> subprocess.CompletedProcess:
    command = [str(COMMAND), "contract-test", "--service", kind, "--target", address, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd="/")


def counted(output: str, what: str) -> int:
    found = re.search(rf"(\d+) {what}", output.splitlines()[-1])
    return int(found[1]) if found else 0


@pytest.mark.parametrize(
    ("kind", "cases", "not_tried"),
    [
        ("broker", 15, ""),
        ("reward", 14, ""),
        ("environment", 15, ""),
        ("rollout", 10, "the trainer's side of a weight group"),
        ("trainer", 8, "--ends"),
    ],
)
def test_our_own_pass_and_what_was_not_tried_is_said(stack, kind, cases, not_tried):
    server = stack.servers[ENGINES[0] if kind == "rollout" else kind]
    if kind == "rollout":
        stack.weights(ENGINES[0]).ensure(World(stack.callers()))
    if kind == "trainer":
        stack.wait_until_trained()
    done = contract_test(kind, server.caller().address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert counted(done.stdout, "passed") >= cases and "contract 1." in done.stdout
    assert not_tried in done.stdout if not_tried else not counted(done.stdout, "skipped")
    server.must_run()


def test_a_wrong_one_is_told_what_is_wrong_and_what_was_asked():
    with wrong_reward.serving() as address:
        done = contract_test("reward", address)
    assert done.returncode == 1, done.stdout + done.stderr
    told = done.stdout
    for case in ("Score: a batch", "Score: one id twice", "ListVerifiers: all", "Execute: no source"):
        assert f"FAILED RewardService.{case}" in told, (case, told)
    assert "was answered, not refused with INVALID_ARGUMENT" in told
    assert "a call was refused with UNIMPLEMENTED" in told
    assert "At index 0 diff: 'formless' != 'right'" in told  # what came is shown
    # What is right is counted as right: a handshake that asks for nothing special.
    assert counted(told, "passed") == 2 and counted(told, "failed") == 12, told


def test_certificates_are_shown_by_whoever_has_them(tmp_path: Path):
    create_authority(tmp_path)
    for name in ("reward", "operator"):
        issue(tmp_path, name, [name])
    files = [(tmp_path / name).read_bytes() for name in ("reward-key.pem", "reward.pem", "ca.pem")]
    credentials = grpc.ssl_server_credentials([(files[0], files[1])], files[2], require_client_auth=True)
    own = ["--ca", "ca.pem", "--certificate", "operator.pem", "--key", "operator-key.pem"]
    shown = [word if word.startswith("--") else str(tmp_path / word) for word in own]
    with wrong_reward.serving(credentials) as address:
        without, incomplete = contract_test("reward", address), contract_test("reward", address, *shown[:2])
        done = contract_test("reward", address, *shown, "-k", "Handshake")
    assert without.returncode == incomplete.returncode == 2
    assert "go together" in incomplete.stderr
    assert done.returncode == 1 and counted(done.stdout, "passed") == counted(done.stdout, "failed") == 2, done.stdout


def test_another_service_at_the_address_is_named():
    with wrong_reward.serving() as address:
        done = contract_test("broker", address)
    assert done.returncode == 2 and "answers a reward, not a broker" in done.stderr, done.stdout + done.stderr
