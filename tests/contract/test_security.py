"""Who is refused: every RPC of the contract, called without a certificate, with a foreign, an expired or the wrong one.

The servers are the bootstrap that every service has, with servicers that implement nothing: UNIMPLEMENTED is the answer
to whoever was let in.
"""

import asyncio
import datetime
import importlib
import shutil
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
from certified import held, serving
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from quartet.v1 import common_pb2

from quartet_client.authority import create_authority, issue
from quartet_common.channel import connect
from quartet_common.config import SecuritySection
from quartet_common.errors import describe
from quartet_common.handshake import handshake
from quartet_common.identity import ROLES, allowed_roles
from quartet_contract.calls import OWNERS, SERVICES, Caller
from quartet_server.host import ServiceHost


def serving_nothing(security: SecuritySection, kind: str) -> AbstractAsyncContextManager[ServiceHost]:
    """A server of a kind that implements none of its RPCs."""
    stubs, name = importlib.import_module(f"quartet.v1.{kind}_pb2_grpc"), OWNERS[kind]
    servicer = getattr(stubs, f"{name}Servicer")()
    return serving(security, kind, add=partial(getattr(stubs, f"add_{name}Servicer_to_server"), servicer))


def methods(kind: str) -> list[MethodDescriptor]:
    return list(SERVICES[OWNERS[kind]].methods)


EVERY_RPC = [method for kind in OWNERS for method in methods(kind)]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


@dataclass
class World:
    """A certificate authority, and a server of each kind that trusts it."""

    folder: Path
    hosts: dict[str, ServiceHost]

    def security(self, name: str, folder: str = "pki") -> SecuritySection:
        return held(self.folder / folder, name, ca=self.folder / "pki" / "ca.pem")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    create_authority(folder / "pki")
    for role in ROLES:
        issue(folder / "pki", role, [role])
    create_authority(folder / "foreign")
    issue(folder / "foreign", "operator", ["operator"])
    write_twin(folder / "pki", "operator", folder / "expired", (-2, -1))
    write_twin(folder / "pki", "client", folder / "bare", (-1, 1), roles=False)
    return folder


def write_twin(pki: Path, name: str, into: Path, hours: tuple[int, int], roles: bool = True) -> None:
    """Sign the same key again, from so many hours from now to so many, with or without what says its roles."""
    into.mkdir()
    certificate = x509.load_pem_x509_certificate((pki / f"{name}.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((pki / "ca-key.pem").read_bytes(), password=None)
    since, until = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=hour) for hour in hours)
    number = x509.random_serial_number()
    twin = x509.CertificateBuilder(
        certificate.issuer, certificate.subject, certificate.public_key(), number, since, until
    )
    for extension in certificate.extensions if roles else ():
        twin = twin.add_extension(extension.value, extension.critical)
    (into / f"{name}.pem").write_bytes(twin.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    shutil.copy(pki / f"{name}-key.pem", into)


@pytest.fixture
async def world(certificates) -> AsyncIterator[World]:
    world = World(certificates, {})
    async with AsyncExitStack() as stack:
        for kind in OWNERS:
            world.hosts[kind] = await stack.enter_async_context(serving_nothing(world.security(kind), kind))
        yield world


async def refusal(channel: grpc.aio.Channel, method: MethodDescriptor) -> tuple[grpc.StatusCode, str]:
    """Call with an empty request and return code and sentence of the error that comes."""
    call = Caller("", channel=channel).callable(method, lambda message: message.SerializeToString())
    # A stream is refused before anything is sent: what is being sent then would, at times, be told as cancelled.
    requests = [] if method.client_streaming else [GetMessageClass(method.input_type)()]
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
        asked = methods(kind)
        async with connect(host.address, security, service=kind) as channel:
            answers = await asyncio.gather(*(refusal(channel, method) for method in asked))
        return {path_of(method): code for method, (code, _) in zip(asked, answers, strict=True)}

    found = await asyncio.gather(*(of(kind, host) for kind, host in world.hosts.items()))
    return {path: code for codes in found for path, code in codes.items()}


def test_the_table_says_of_every_rpc_whose_it_is():
    unnamed = [path_of(method) for method in EVERY_RPC if allowed_roles(path_of(method)) == {"operator"}]
    assert not unnamed, "quartet_common.identity must name who may call"


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


async def test_roles_can_be_left_out(certificates):
    security = held(certificates / "pki", "reward").model_copy(update={"roles": False})
    trainer = held(certificates / "pki", "trainer")
    async with serving_nothing(security, "reward") as host, connect(host.address, trainer, service="reward") as channel:
        code, _ = await refusal(channel, methods("reward")[0])
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_a_certificate_without_a_role_is_told_so(world):
    security = world.security("client", "bare")
    async with connect(world.hosts["broker"].address, security, service="broker") as channel:
        # It is known, so it may ask who is there; and nothing else.
        answer = await handshake(channel, common_pb2.SERVICE_KIND_CLIENT)
        assert answer.instance_id == world.hosts["broker"].instance_id
        code, sentence = await refusal(channel, methods("broker")[0])
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "has no role" in sentence and "allowed: client, operator" in sentence
