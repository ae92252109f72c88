"""Who may send weights where callers have certificates: the trainer that has the session of the run."""

import subprocess
from pathlib import Path

import grpc
import pytest
from quartet.v1 import rollout_pb2, rollout_pb2_grpc
from world import begin_request, finish_request, join_request

from quartet_common.channel import connect
from quartet_common.config import SecuritySection
from quartet_common.errors import describe

# As `quartet certs` makes them, in one process.
CERTIFICATES = """
import sys; from pathlib import Path
from quartet_client.authority import create_authority, issue
folder = Path(sys.argv[1]); create_authority(folder)
for name in ("rollout", "trainer", "trainer2", "client", "operator"): issue(folder, name, [name.rstrip("2")])
"""
CALLS = {
    "JoinWeightGroup": join_request(),
    "BeginWeightUpdate": begin_request(1),
    "FinishWeightUpdate": finish_request(1),
    "AbortWeightUpdate": rollout_pb2.AbortWeightUpdateRequest(run_id="demo"),
    "SetSleep": rollout_pb2.SetSleepRequest(level=0),
}


@pytest.fixture(scope="module")
def pki(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pki")
    python = Path(__file__).parents[4] / ".quartet" / "envs" / "client" / "bin" / "python"
    subprocess.run([python, "-c", CERTIFICATES, folder], check=True, timeout=60)
    return folder


def security(pki: Path, name: str) -> SecuritySection:
    return SecuritySection(tls_ca=pki / "ca.pem", tls_certificate=pki / f"{name}.pem", tls_key=pki / f"{name}-key.pem")


async def test_weights_come_from_the_trainer_of_the_run(world, pki):
    world.security = security(pki, "rollout")
    await world.ready()

    async def denied(name: str) -> set[str]:
        found = set()
        async with connect(world.host.address, security(pki, name), service="rollout") as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            for method, request in CALLS.items():
                try:
                    await getattr(stub, method)(request, timeout=20)
                except grpc.aio.AioRpcError as error:
                    if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                        assert "the training of run 'demo'" in describe(error)
                        found.add(method)
        return found

    for owner, refused in (("trainer", {"trainer2"}), ("trainer2", {"trainer"}), ("", set())):
        world.broker.run.trained_by = owner
        # One that is known to have the session keeps it until another one calls: the one that took over comes first.
        for name in sorted(("trainer", "trainer2"), key=refused.__contains__):
            assert await denied(name) == (set(CALLS) if name in refused else set())
    assert await denied("operator") == set()


async def test_a_client_drains_the_rollouts_of_a_run_that_it_made(world, pki):
    world.security = security(pki, "rollout")
    await world.ready()
    request = rollout_pb2.SetDrainRequest()

    async def answer(name: str, owner: str) -> str:
        world.service.state.run.made_by = owner
        async with connect(world.host.address, security(pki, name), service="rollout") as channel:
            try:
                await rollout_pb2_grpc.RolloutServiceStub(channel).SetDrain(request, timeout=20)
            except grpc.aio.AioRpcError as error:
                return describe(error)
        return "done"

    assert [await answer(name, "client") for name in ("client", "operator")] == ["done", "done"]
    assert "run 'demo': it belongs to the certificate 'alice'" in await answer("client", "alice")
    assert "allowed: client, operator" in await answer("trainer", "client")
