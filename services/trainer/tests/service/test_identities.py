"""Who may stop, pause and save a training where callers have certificates: the client that made its run."""

import subprocess
from pathlib import Path

import grpc
from quartet.v1 import trainer_pb2, trainer_pb2_grpc

from quartet_common.channel import connect
from quartet_common.config import SecuritySection, ServerSection
from quartet_common.errors import describe
from quartet_server.host import ServiceHost
from quartet_trainer.config import TrainerSection
from quartet_trainer.control import Control
from quartet_trainer.servicer import TrainerServicer
from quartet_trainer.status import Status

# As `quartet certs` makes them, in one process.
CERTIFICATES = """
import sys; from pathlib import Path
from quartet_client.authority import create_authority, issue
folder = Path(sys.argv[1]); create_authority(folder)
for name, role in {"trainer": "trainer", "operator": "operator", "alice": "client", "bob": "client"}.items():
    issue(folder, name, [role])
"""
ASKS = {"Stop", "Pause", "Resume", "SaveCheckpoint"}
LOOKS = {"GetStatus", "ListCheckpoints", "WatchMetrics"}


async def test_a_training_is_stopped_by_who_made_its_run(tmp_path):
    python = Path(__file__).parents[4] / ".quartet" / "envs" / "client" / "bin" / "python"
    subprocess.run([python, "-c", CERTIFICATES, tmp_path], check=True, timeout=60)

    def security(name: str) -> SecuritySection:
        certificate, key = tmp_path / f"{name}.pem", tmp_path / f"{name}-key.pem"
        return SecuritySection(tls_ca=tmp_path / "ca.pem", tls_certificate=certificate, tls_key=key)

    host = ServiceHost("trainer", "127.0.0.1:0", security("trainer"), ServerSection(metrics=False))
    status = Status("demo")
    servicer = TrainerServicer(TrainerSection(), 1, tmp_path / "checkpoints", status, Control(), lambda reason: None)
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(servicer, host.server)
    await host.start()
    status.close()  # a watcher is answered with what there is

    async def denied(name: str) -> set[str]:
        found = set()
        async with connect(host.address, security(name), service="trainer") as channel:
            for method in trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].methods:
                stub = trainer_pb2_grpc.TrainerServiceStub(channel)
                request = getattr(trainer_pb2, method.input_type.name)()
                try:
                    call = getattr(stub, method.name)(request, timeout=20)
                    await (call.read() if method.server_streaming else call)
                except grpc.aio.AioRpcError as error:
                    if error.code() == grpc.StatusCode.PERMISSION_DENIED:
                        found.add(method.name)
                        assert name == "trainer" or "belongs to the certificate 'alice'" in describe(error)
        return found

    try:
        assert await denied("bob") == set(), "nobody's run: it is not known yet, or was made without a certificate"
        status.made_by = "alice"
        found = {name: await denied(name) for name in ("alice", "bob", "operator", "trainer")}
    finally:
        await host.drain()
    by_role = ASKS | LOOKS - {"GetStatus"}
    assert found == {"alice": set(), "bob": ASKS, "operator": set(), "trainer": by_role}


async def test_of_a_long_reason_the_beginning_is_logged(tmp_path):
    said: list[str] = []
    servicer = TrainerServicer(TrainerSection(), 1, tmp_path, Status("demo"), Control(), said.append)
    await servicer.Stop(trainer_pb2.StopRequest(reason=10_000 * "x"), None)
    assert said[0].endswith("x…") and len(said[0]) < 1100
