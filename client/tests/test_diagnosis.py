"""Each reason for which a service cannot be reached is told from the others, by real servers and real handshakes."""

import datetime
import shutil
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from quartet_client.async_client import AsyncClient
from quartet_client.authority import create_authority, issue
from quartet_client.errors import QuartetError
from quartet_common.config import SecuritySection, ServerSection
from quartet_server.host import ServiceHost

PLAINTEXT = SecuritySection()


def expired(folder: Path) -> None:
    """Sign the broker's certificate again, with the dates of a day that is past."""
    path = folder / "broker.pem"
    old = x509.load_pem_x509_certificate(path.read_bytes())
    key = serialization.load_pem_private_key((folder / "ca-key.pem").read_bytes(), None)
    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=9)
    builder = x509.CertificateBuilder(
        old.issuer, old.subject, old.public_key(), old.serial_number, begin, begin + datetime.timedelta(days=1),
        list(old.extensions),
    )  # fmt: skip
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


@pytest.fixture(scope="module")
def security(tmp_path_factory) -> dict[str, SecuritySection]:
    """What a side may be configured with."""
    root = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "foreign"):
        create_authority(root / name)
        issue(root / name, "broker", ["broker", "client"])
        issue(root / name, "reward", ["reward"])
    shutil.copytree(root / "ours", root / "expired")
    expired(root / "expired")

    def section(folder: str, ca: str, name: str = "broker") -> SecuritySection:
        files = root / folder / f"{name}.pem", root / folder / f"{name}-key.pem"
        return SecuritySection(tls_ca=root / ca / "ca.pem", tls_certificate=files[0], tls_key=files[1])

    return {
        "plaintext": PLAINTEXT,
        "ours": section("ours", "ours"),
        "a reward service's": section("ours", "ours", "reward"),
        "expired": section("expired", "ours"),
        "foreign": section("foreign", "foreign"),
        "foreign, our CA": section("foreign", "ours"),
        "our certificate, foreign CA": section("ours", "foreign"),
    }


async def told(client: SecuritySection, address: str) -> str:
    """Return what a client says of a broker that it cannot call, without the broker's name."""
    async with AsyncClient(broker=address, security=client, timeout=10) as asking:
        with pytest.raises(QuartetError) as failed:
            await asking.get_run("any")
    text = str(failed.value)
    assert text.startswith(f"broker at {address}: ") and failed.value.exit_code == 2
    return text.removeprefix(f"broker at {address}: ")


@pytest.mark.parametrize(
    ("server", "client", "host", "expected"),
    [
        ("ours", "plaintext", "127.0.0.1", "it speaks TLS, and this side plaintext; set tls_ca, "),
        ("plaintext", "ours", "127.0.0.1", "it speaks plaintext, and this side TLS; its [security] needs a "),
        ("expired", "ours", "127.0.0.1", "its certificate has expired; issue it again"),
        ("foreign", "ours", "127.0.0.1", "its certificate is of another CA than security.tls_ca ("),
        ("ours", "ours", "127.0.0.2", "its certificate is not that of a broker at '127.0.0.2'; issue "),
        ("a reward service's", "ours", "127.0.0.1", "its certificate is not that of a broker at '127.0.0.1'; issue "),
        ("ours", "expired", "127.0.0.1", "this side's certificate '{certificate}' has expired; issue it again"),
        ("ours", "foreign, our CA", "127.0.0.1", "this side's certificate '{certificate}' is of another CA than sec"),
        ("our certificate, foreign CA", "ours", "127.0.0.1", "it does not trust the CA of this side's certificate; "),
    ],
)
async def test_each_failed_handshake_has_its_own_sentence(security, server, client, host, expected):
    settings = ServerSection(metrics=False, bind_host="127.0.0.1" if server == "plaintext" else "0.0.0.0")
    service = ServiceHost("broker", "127.0.0.1:0", security[server], settings)
    await service.start()
    try:
        text = await told(security[client], f"{host}:{service.address.rpartition(':')[2]}")
    finally:
        await service.drain()
    assert text.startswith(expected.format(certificate=security[client].tls_certificate))


async def test_nobody_listens_and_a_name_that_nobody_has():
    assert await told(PLAINTEXT, "127.0.0.1:1") == "nothing listens there; is it running, and is its address right?"
    text = await told(PLAINTEXT, "no-such-host.invalid:7101")
    assert text.startswith("the name 'no-such-host.invalid' does not resolve (")
