"""Who is refused: every RPC of the contract, called without a certificate, with a foreign, an expired or the wrong one.

The servers are the bootstrap that every service has, with servicers that implement nothing: UNIMPLEMENTED is the answer
to whoever was let in.
"""

import asyncio
import datetime
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from quartet.v1 import (
    broker_pb2,
    broker_pb2_grpc,
    common_pb2,
    reward_pb2,
    reward_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)

from quartet_client.authority import create_authority, issue
from quartet_common.channel import connect
from quartet_common.config import SecuritySection, ServerSection
from quartet_common.errors import describe
from quartet_common.handshake import handshake
from quartet_common.host import ServiceHost
from quartet_common.roles import ROLES, allowed_roles, is_named

SERVICERS = {
    "broker": (broker_pb2, broker_pb2_grpc.BrokerServiceServicer, broker_pb2_grpc.add_BrokerServiceServicer_to_server),
    "reward": (reward_pb2, reward_pb2_grpc.RewardServiceServicer, reward_pb2_grpc.add_RewardServiceServicer_to_server),
    "rollout": (
        rollout_pb2,
        rollout_pb2_grpc.RolloutServiceServicer,
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server,
    ),
    "trainer": (
        trainer_pb2,
        trainer_pb2_grpc.TrainerServiceServicer,
        trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
    ),
}


def methods(kind: str) -> Iterator[MethodDescriptor]:
    module = SERVICERS[kind][0]
    yield from module.DESCRIPTOR.services_by_name[f"{kind.capitalize()}Service"].methods


EVERY_RPC = [(kind, method) for kind in SERVICERS for method in methods(kind)]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@dataclass
class World:
    """A certificate authority, and a server of each kind that trusts it."""

    folder: Path
    hosts: dict[str, ServiceHost]

    def security(self, name: str, folder: str = "pki") -> SecuritySection:
        root = self.folder / folder
        return SecuritySection(
            tls_ca=self.folder / "pki" / "ca.pem",
            tls_certificate=root / f"{name}.pem",
            tls_key=root / f"{name}-key.pem",
        )


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    create_authority(folder / "pki")
    for role in ROLES:
        issue(folder / "pki", role, [role])
    create_authority(folder / "foreign")
    issue(folder / "foreign", "operator", ["operator"])
    expire(folder / "pki", "operator", folder / "expired")
    return folder


def expire(folder: Path, name: str, into: Path) -> None:
    """Sign a certificate's twin that was good until an hour ago."""
    into.mkdir()
    certificate = x509.load_pem_x509_certificate((folder / f"{name}.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), password=None)
    now = datetime.datetime.now(datetime.UTC)
    twin = (
        x509.CertificateBuilder()
        .subject_name(certificate.subject)
        .issuer_name(certificate.issuer)
        .public_key(certificate.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=2))
        .not_valid_after(now - datetime.timedelta(hours=1))
    )
    for extension in certificate.extensions:
        twin = twin.add_extension(extension.value, extension.critical)
    (into / f"{name}.pem").write_bytes(twin.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    (into / f"{name}-key.pem").write_bytes((folder / f"{name}-key.pem").read_bytes())


@pytest.fixture
async def world(certificates) -> AsyncIterator[World]:
    world = World(certificates, {})
    for kind, (_, servicer, add) in SERVICERS.items():
        host = ServiceHost(kind, "127.0.0.1:0", world.security(kind), ServerSection(metrics=False))
        add(servicer(), host.server)
        await host.start()
        world.hosts[kind] = host
    yield world
    for host in world.hosts.values():
        await host.drain()


async def refusal(channel: grpc.aio.Channel, method: MethodDescriptor) -> tuple[grpc.StatusCode, str]:
    """Call with an empty request and return code and sentence of the error that comes."""
    request_class, response_class = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(channel, kind)(
        path_of(method),
        request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString,
    )
    # A stream is refused before anything is sent: what is being sent then would, at times, be told as cancelled.
    requests = [] if method.client_streaming else [request_class()]
    try:
        answer = call(*requests, timeout=30)
        if method.server_streaming:
            async for _ in answer:
                break
        else:
            await answer
    except grpc.aio.AioRpcError as error:
        return error.code(), describe(error)
    raise AssertionError(f"{path_of(method)} answered")


async def all_refusals(world: World, security: SecuritySection | None) -> dict[str, grpc.StatusCode]:
    """Return how each RPC refuses a caller: all at once, over one channel a service."""

    async def of(kind: str, host: ServiceHost) -> dict[str, grpc.StatusCode]:
        asked = list(methods(kind))
        async with connect(host.address, security, service=kind) as channel:
            answers = await asyncio.gather(*(refusal(channel, method) for method in asked))
        return {path_of(method): code for method, (code, _) in zip(asked, answers, strict=True)}

    found = await asyncio.gather(*(of(kind, host) for kind, host in world.hosts.items()))
    return {path: code for codes in found for path, code in codes.items()}


def test_the_table_says_of_every_rpc_whose_it_is():
    unnamed = [path_of(method) for _, method in EVERY_RPC if not is_named(path_of(method))]
    assert not unnamed, "quartet_common.roles must name who may call"


def test_the_page_says_what_the_table_says():
    page = (Path(__file__).parents[2] / "docs" / "certificates.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+Service)` \| (.*) \|$", page, re.MULTILINE)
    written = {(role, f"/quartet.v1.{kind}/{name}") for role, kind, may in rows for name in re.findall(r"`(\w+)`", may)}
    enforced = {(role, path_of(rpc)) for role in ROLES for _, rpc in EVERY_RPC if role in allowed_roles(path_of(rpc))}
    assert written == {(role, path) for role, path in enforced if role != "operator"}


@pytest.mark.parametrize("who", ["none", "foreign", "expired"])
async def test_strangers_reach_no_rpc(world, who):
    security = None if who == "none" else world.security("operator", who)
    codes = await all_refusals(world, security)
    assert len(codes) == len(EVERY_RPC)
    # They do not get past the handshake of TLS.
    assert set(codes.values()) == {grpc.StatusCode.UNAVAILABLE}


@pytest.mark.parametrize("role", ROLES)
async def test_a_role_reaches_its_rpcs_and_no_other(world, role):
    codes = await all_refusals(world, world.security(role))
    let_in = {path for path, code in codes.items() if code is grpc.StatusCode.UNIMPLEMENTED}
    kept_out = {path for path, code in codes.items() if code is grpc.StatusCode.PERMISSION_DENIED}
    assert let_in | kept_out == set(codes)
    assert let_in == {path for path in codes if role in allowed_roles(path)}
    assert bool(kept_out) == (role != "operator")


async def test_a_certificate_without_a_role_is_told_so(world, certificates):
    issue(certificates / "pki", "plain", ["client"])
    path = certificates / "pki" / "plain.pem"
    ca_key = serialization.load_pem_private_key((certificates / "pki" / "ca-key.pem").read_bytes(), password=None)
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    bare = x509.CertificateBuilder(
        certificate.issuer, certificate.subject, certificate.public_key(), certificate.serial_number
    )
    bare = bare.not_valid_before(certificate.not_valid_before_utc).not_valid_after(certificate.not_valid_after_utc)
    path.write_bytes(bare.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    async with connect(world.hosts["broker"].address, world.security("plain"), service="broker") as channel:
        # It is known, so it may ask who is there; and nothing else.
        answer = await handshake(channel, common_pb2.SERVICE_KIND_CLIENT)
        assert answer.instance_id == world.hosts["broker"].instance_id
        code, sentence = await refusal(channel, next(methods("broker")))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "has no role" in sentence and "allowed: client, operator" in sentence


async def test_roles_can_be_left_out(certificates):
    world = World(certificates, {})
    security = world.security("reward").model_copy(update={"roles": False})
    host = ServiceHost("reward", "127.0.0.1:0", security, ServerSection(metrics=False))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward_pb2_grpc.RewardServiceServicer(), host.server)
    await host.start()
    async with connect(host.address, world.security("trainer"), service="reward") as channel:
        code, _ = await refusal(channel, reward_pb2.DESCRIPTOR.services_by_name["RewardService"].methods[0])
    assert code is grpc.StatusCode.UNIMPLEMENTED
    await host.drain()


async def test_new_certificates_are_taken_up_without_a_restart(tmp_path):
    """A new CA on both sides: whoever still shows the old one is a stranger, and the channel goes on by itself."""
    folder = tmp_path / "pki"
    create_authority(folder)
    for name in ("reward", "client"):
        issue(folder, name, [name])

    def security(name: str) -> SecuritySection:
        return SecuritySection(
            tls_ca=folder / "ca.pem", tls_certificate=folder / f"{name}.pem", tls_key=folder / f"{name}-key.pem"
        )

    host = ServiceHost("reward", "127.0.0.1:0", security("reward"), ServerSection(metrics=False))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward_pb2_grpc.RewardServiceServicer(), host.server)
    await host.start()
    method = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].methods[0]
    async with connect(host.address, security("client"), service="reward") as channel:
        code, _ = await refusal(channel, method)
        assert code is grpc.StatusCode.UNIMPLEMENTED
        old = tmp_path / "old"
        folder.rename(old)
        create_authority(folder)
        for name in ("reward", "client"):
            issue(folder, name, [name])
        async with asyncio.timeout(20):
            # Both sides look once a second; until both have, they do not know each other.
            while True:
                async with connect(host.address, security("client"), service="reward") as newcomer:
                    if (await refusal(newcomer, method))[0] is grpc.StatusCode.UNIMPLEMENTED:
                        break
            while (await refusal(channel, method))[0] is not grpc.StatusCode.UNIMPLEMENTED:
                pass
        stale = SecuritySection(
            tls_ca=old / "ca.pem", tls_certificate=old / "client.pem", tls_key=old / "client-key.pem"
        )
        async with connect(host.address, stale, service="reward") as stranger:
            assert (await refusal(stranger, method))[0] is grpc.StatusCode.UNAVAILABLE
    await host.drain()


async def test_half_a_rotation_changes_nothing(tmp_path):
    folder = tmp_path / "pki"
    create_authority(folder)
    issue(folder, "reward", ["reward", "client"])
    security = SecuritySection(
        tls_ca=folder / "ca.pem", tls_certificate=folder / "reward.pem", tls_key=folder / "reward-key.pem"
    )
    host = ServiceHost("reward", "127.0.0.1:0", security, ServerSection(metrics=False))
    reward_pb2_grpc.add_RewardServiceServicer_to_server(reward_pb2_grpc.RewardServiceServicer(), host.server)
    await host.start()
    whole = tmp_path / "whole"
    whole.mkdir()
    for file in folder.iterdir():
        (whole / file.name).write_bytes(file.read_bytes())
    issue(folder, "other", ["reward"])
    (folder / "reward-key.pem").write_bytes((folder / "other-key.pem").read_bytes())
    await asyncio.sleep(1.1)  # the server looks once a second: the clock is what is waited for
    copy = SecuritySection(
        tls_ca=whole / "ca.pem", tls_certificate=whole / "reward.pem", tls_key=whole / "reward-key.pem"
    )
    async with connect(host.address, copy, service="reward") as channel:
        assert (await handshake(channel, common_pb2.SERVICE_KIND_CLIENT)).instance_id == host.instance_id
    await host.drain()
