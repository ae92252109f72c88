"""Callers check who answers: a server's host and role. How keys are kept and revoked."""

import asyncio
from pathlib import Path

import grpc
import pytest
from certified import held, serving
from quartet.v1 import common_pb2

from quartet_client.authority import EXPORTED, create_authority, export, issue
from quartet_common import certificates
from quartet_common.channel import connect
from quartet_common.config import ConfigError, SecuritySection
from quartet_common.handshake import handshake
from quartet_common.identity import SERVERS
from quartet_server.host import ServiceHost


async def answers(host: ServiceHost, security: SecuritySection, service: str) -> bool:
    """Whether a handshake with `host`, taken for a `service`, comes about over a new connection."""
    async with connect(host.address, security, service=service) as channel:
        try:
            answer = await handshake(channel, common_pb2.SERVICE_KIND_CLIENT, timeout=10)
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
    return answer.instance_id == host.instance_id


async def believed(host: ServiceHost, security: SecuritySection) -> list[str]:
    """Return the services for which a caller takes `host`."""
    found = await asyncio.gather(*(answers(host, security, service) for service in SERVERS))
    return [service for service, is_one in zip(SERVERS, found, strict=True) if is_one]


@pytest.fixture
def pki(tmp_path) -> Path:
    folder = tmp_path / "pki"
    create_authority(folder)
    for role in (*SERVERS, "client", "operator"):
        issue(folder, role, [role])
    return folder


async def test_a_server_is_believed_in_its_own_role_alone(pki):
    async def check(presented: str) -> None:
        async with serving(held(pki, presented)) as host:
            assert await believed(host, held(pki, "client")) == [presented] * (presented in SERVERS)

    await asyncio.gather(*map(check, (*SERVERS, "client", "operator")))


async def test_a_server_with_the_right_role_at_another_host_is_not_believed(pki):
    async with serving(held(pki, "broker"), address="127.0.0.2:0") as host:
        assert not await answers(host, held(pki, "client"), "broker")
        issue(pki, "elsewhere", ["broker"], ["127.0.0.2"])
    async with serving(held(pki, "elsewhere"), address="127.0.0.2:0") as host:
        assert await answers(host, held(pki, "client"), "broker")
        assert not await answers(host, held(pki, "client"), "rollout")


async def test_a_certificate_with_two_roles_answers_as_either_and_over_ipv6(pki):
    issue(pki, "both", ["rollout", "reward"])
    async with serving(held(pki, "both"), address="[::1]:0") as host:
        host.address = f"[::1]:{host.address.rpartition(':')[2]}"
        assert await believed(host, held(pki, "client")) == ["reward", "rollout"]


async def test_the_check_can_be_left_out(pki):
    async with serving(held(pki, "rollout")) as host:
        assert await answers(host, held(pki, "client").model_copy(update={"server_roles": False}), "broker")


def exported(folder: Path) -> SecuritySection:
    return SecuritySection(tls_ca=folder / "ca.crt", tls_certificate=folder / "tls.crt", tls_key=folder / "tls.key")


async def test_a_stolen_key_is_revoked_by_a_second_authority_without_a_stop(pki, tmp_path):
    """Trust both, take new certificates, trust the new one alone: a broker and its callers go on throughout."""
    stolen = tmp_path / "stolen"
    export(pki, "rollout", stolen)
    thief = exported(stolen)
    used = {name: tmp_path / "hosts" / name for name in ("broker", "client")}
    for name, folder in used.items():
        export(pki, name, folder)
    own = {name: exported(at) for name, at in used.items()}
    second = tmp_path / "second"
    create_authority(second)
    old_ca, new_ca = (pki / "ca.pem").read_bytes(), (second / "ca.pem").read_bytes()
    async with serving(own["broker"]) as host, connect(host.address, own["client"], service="broker") as channel:

        async def call() -> None:
            assert (await handshake(channel, common_pb2.SERVICE_KIND_CLIENT)).instance_id == host.instance_id

        async def taken_up() -> None:
            await asyncio.sleep(1.1)  # files are looked at once a second: the clock is what is waited for
            await call()
            assert await answers(host, own["client"], "broker")

        await call()
        for at in used.values():
            put(at / "ca.crt", old_ca + new_ca)
        await taken_up()
        for name, at in used.items():
            issue(second, name, [name])
            export(second, name, at)
            put(at / "ca.crt", old_ca + new_ca)
            await taken_up()
        for at in used.values():
            put(at / "ca.crt", new_ca)
        await taken_up()
        assert not await answers(host, thief.model_copy(update={"tls_ca": used["client"] / "ca.crt"}), "broker")
    async with serving(thief, "rollout") as impostor:
        assert not await answers(impostor, own["client"], "rollout")


def put(path: Path, content: bytes) -> None:
    aside = path.with_suffix(".new")
    aside.write_bytes(content)
    aside.replace(path)


def test_a_service_refuses_the_key_of_the_authority(pki, tmp_path):
    folder = tmp_path / "broker"
    export(pki, "broker", folder)
    assert sorted(file.name for file in folder.iterdir()) == sorted(EXPORTED)
    own = exported(folder)
    certificates.check_service_files(own, "broker", "127.0.0.1")
    with pytest.raises(ConfigError, match="ca-key.pem' is the private key of the CA"):
        certificates.check_service_files(held(pki, "broker"), "broker", "127.0.0.1")
    # Under any name, of any of the CAs it trusts.
    create_authority(tmp_path / "second")
    put(folder / "ca.crt", (pki / "ca.pem").read_bytes() + (tmp_path / "second" / "ca.pem").read_bytes())
    certificates.check_service_files(own, "broker", "127.0.0.1")
    (folder / "notes").write_bytes((tmp_path / "second" / "ca-key.pem").read_bytes())
    with pytest.raises(ConfigError, match="notes' is the private key of the CA"):
        certificates.check_service_files(own, "broker", "127.0.0.1")
    (folder / "notes").unlink()
    with pytest.raises(ConfigError, match="is the private key of the CA"):
        certificates.check_service_files(held(pki, "ca"), "broker", "127.0.0.1")
