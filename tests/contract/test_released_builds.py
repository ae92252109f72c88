"""Releases as they were built: their client against today's services, today's client against their services."""

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from contract_stack import ENGINES, RUN, Stack
from quartet.v1 import rollout_pb2
from release import IMAGES, RELEASES, rpcs_of, unpack
from servers_under_test import RELEASED, python_of
from use_client import use_client

from quartet_common.tensors import encode_ragged
from quartet_contract.target import group_tensors
from quartet_contract.world import World

ENGINE = ENGINES[0]
RPCS_OF = {image.stem: rpcs_of(image) for image in IMAGES}
SCRIPT = Path(__file__).with_name("released_calls.py")


def addresses_of(stack: Stack) -> dict[str, str]:
    return {kind: stack.servers[ENGINE if kind == "rollout" else kind].caller().address for kind in RELEASED}


def test_each_released_contract_has_its_build():
    assert set(RPCS_OF) == set(RELEASES)


@pytest.mark.parametrize("release", RELEASES)
def test_the_released_client_makes_every_call_at_todays_services(stack, release, tmp_path: Path):
    weights = stack.weights(ENGINE)
    rollout = stack.callers(ENGINE)["RolloutService"]
    stack.wait_until_trained()
    status = rollout.call("RolloutService.GetStatus", rollout_pb2.RolloutServiceGetStatusRequest())
    orders = {
        "addresses": addresses_of(stack),
        "python": str(python_of("trainer", release=True)),
        "model": str(stack.models[0]),
        "folder": str(tmp_path),
        "engine": ENGINE,
        "run": RUN,
        "epoch": max(weights.epoch, status.group_epoch),
        "version": max(weights.version, status.policy_version),
    }
    (tmp_path / "orders.json").write_text(json.dumps(orders))
    environment = {**os.environ, **unpack(release, tmp_path / "release", calls=True)}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "orders.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    *told, newest = [json.loads(line) for line in done.stdout.splitlines()]
    # Whoever tests this rollout next opens epochs above those that were opened here.
    weights.epoch, weights.version = newest["epoch"], newest["version"]
    wrong = [f"{each['rpc']}, {each['title']}:\n{each['why']}" for each in told if each["why"]]
    assert not wrong, "\n".join(wrong)
    called = {each["rpc"] for each in told}
    # Stop ends the service: that it does as ever is test_rpcs' to show.
    assert called - {"client"} == RPCS_OF[release] - {"TrainerService.Stop"} and "client" in called


READ = """
import sys
from quartet.v1 import experience_pb2
from quartet_trainer.batches.experience import ExperienceError, decode_groups
try:
    decode_groups([experience_pb2.GroupTensors.FromString(sys.stdin.buffer.read())], 1000)
    print("trained")
except ExperienceError as error:
    print(error)
"""


@pytest.mark.parametrize("release", RELEASES)
def test_a_released_trainer_refuses_rows_with_prompts_of_their_own_and_trains_turns(release, tmp_path: Path):
    environment = {**os.environ, **unpack(release, tmp_path)}
    group = group_tensors()
    ends = [np.array([length], np.int32) for length in group.completion_token_ids.lengths]
    group.turn_ends.CopyFrom(encode_ragged(ends, group.completion_token_ids.dtype))
    told = []
    for _ in range(2):
        command = [str(python_of("trainer", release=True)), "-c", READ]
        done = subprocess.run(
            command, input=group.SerializeToString(), env=environment, capture_output=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        told.append(done.stdout.decode().strip())
        group.ClearField("prompt_token_ids")  # as in every group whose rows have prompts of their own
    assert told == ["trained", "group 0: prompt_token_ids is unspecified; the contract says int32"]


@pytest.fixture(scope="module", params=RELEASES)
def released_stack(request, tmp_path_factory):
    """The four services of a release."""
    folder = tmp_path_factory.mktemp(f"released-{request.param}")
    with closing(Stack(folder, [ENGINE], alone=[], environment=unpack(request.param, folder / "release"))) as made:
        made.start()
        yield made


async def test_todays_client_is_at_home_at_released_services(released_stack):
    released_stack.weights(ENGINE).publish(World(released_stack.callers(ENGINE)))  # today's, to generate with
    await use_client(addresses_of(released_stack), "todays")
