"""`quartet certs`: what it makes, what it refuses, what it leaves alone."""

import json
import os
import ssl
import stat

import pytest
from cryptography import x509

from quartet_client.authority import create_authority, issue, read_info
from quartet_client.cli.main import main
from quartet_client.errors import InputError
from quartet_common.identity import ROLES, SERVERS


def test_one_command_makes_what_a_deployment_needs(tmp_path, capsys):
    folder = tmp_path / "pki"
    hosts = ("broker=a.example", "rollout=b.example,10.0.0.7", "all.example")
    assert main(["certs", "init", str(folder), *(word for host in hosts for word in ("--host", host))]) == 0
    capsys.readouterr()
    assert main(["certs", "show", str(folder), "--json"]) == 0
    shown = {each["name"]: each["roles"] for each in json.loads(capsys.readouterr().out)}
    ca = read_info(folder / "ca.pem").name
    assert ca.startswith("Quartet CA ") and shown.pop(ca) is not None and shown == {role: [role] for role in ROLES}
    for role in ROLES:
        info = read_info(folder / f"{role}.pem")
        assert (info.name, info.roles) == (role, (role,))
        theirs = {"broker": {"a.example"}, "rollout": {"b.example", "10.0.0.7"}}.get(role, set())
        assert set(info.hosts) == {"localhost", "127.0.0.1", "::1", "all.example"} | theirs
        assert info.server_roles == ((role,) if role in SERVERS else ())
        assert 89 < info.days_left() <= 90
        # OpenSSL agrees that key and certificate belong together, and that the CA signed it.
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(folder / f"{role}.pem", folder / f"{role}-key.pem")
        ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        x509.load_pem_x509_certificate((folder / f"{role}.pem").read_bytes()).verify_directly_issued_by(ca)
    for file in folder.iterdir():
        secret = file.name.endswith("-key.pem")
        assert stat.S_IMODE(file.stat().st_mode) == (0o600 if secret else 0o644), file.name


def test_a_service_gets_a_folder_of_its_own(tmp_path, capsys):
    """Without the CA's key, for the user who will read it; a renewed certificate goes the same way."""
    pki, folder = tmp_path / "pki", tmp_path / "broker"
    assert main(["certs", "init", str(pki)]) == 0
    owner = 10001 if os.geteuid() == 0 else os.geteuid()
    command = ["certs", "export", "broker", str(folder), "--from", str(pki), "--owner", str(owner)]
    for _ in range(2):
        assert main(command) == 0
        assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {
            "ca.crt": 0o444,
            "tls.crt": 0o444,
            "tls.key": 0o400,
        }
        assert {file.stat().st_uid for file in (folder, *folder.iterdir())} == {owner}
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert (folder / "tls.key").read_bytes() == (pki / "broker-key.pem").read_bytes()
        key = (pki / "ca-key.pem").read_bytes()
        assert main(["certs", "renew", str(pki), "broker", "ca"]) == 0
        assert (pki / "ca-key.pem").read_bytes() == key
    owners = {"king": str(owner), "ca": str(owner), "broker": "no-such-user", "reward": str(2**32)}
    for name, user in owners.items():
        assert main(["certs", "export", name, str(folder), "--from", str(pki), "--owner", user]) == 2
    assert main([*command[:3], str(pki), *command[4:]]) == 2  # into the authority's own folder
    tmp_path.chmod(0o755)
    assert main([*command[:3], str(tmp_path), *command[4:]]) == 2 and len(list(tmp_path.iterdir())) == 2
    assert (stat.S_IMODE(tmp_path.stat().st_mode), tmp_path.stat().st_uid) == (0o755, os.geteuid())
    (folder / "token").touch()  # what its holder also has stays
    assert main(command) == 0 and len(list(folder.iterdir())) == 4


def test_what_cannot_be_is_refused_and_changes_nothing(tmp_path, capsys):
    pki = tmp_path / "pki"
    for command, words in (
        (["init", str(pki), "--host", "king=a.example"], "'king' is no role; allowed: broker"),
        (["issue", str(pki), "reward", "--role", "reward"], "holds no CA"),
    ):
        assert main(["certs", *command]) == 2
        assert words in capsys.readouterr().err and not pki.exists()
    create_authority(pki)
    before = (pki / "ca.pem").read_bytes()
    assert main(["certs", "init", str(pki)]) == 2
    assert "holds a CA already" in capsys.readouterr().err and (pki / "ca.pem").read_bytes() == before


def test_renewal_keeps_roles_hosts_and_mode(tmp_path, capsys):
    create_authority(tmp_path)
    issue(tmp_path, "worker", ["rollout", "client"], ["gpu1.example"], days=1)
    os.chmod(tmp_path / "worker-key.pem", 0o640)
    assert main(["certs", "renew", str(tmp_path), "worker", "--days", "30"]) == 0
    info = read_info(tmp_path / "worker.pem")
    assert info.roles == ("client", "rollout") and "gpu1.example" in info.hosts and info.days_left() > 29
    if os.geteuid() == 0:  # who may change an owner keeps what stands
        assert stat.S_IMODE((tmp_path / "worker-key.pem").stat().st_mode) == 0o640


@pytest.mark.parametrize(
    ("name", "roles", "hosts", "days", "says"),
    [
        ("ca", ["client"], [], 1, "name is 'ca'"),
        ("good", ["king"], [], 1, "role is 'king'; allowed: broker"),
        ("good", ["client"], [], 900, "days is 900; allowed: 1 to 825"),
    ],
)
def test_certs_names_bad_values(tmp_path, name, roles, hosts, days, says):
    create_authority(tmp_path)
    with pytest.raises(InputError) as caught:
        issue(tmp_path, name, roles, hosts, days)
    assert says in str(caught.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ca-key.pem", "ca.pem"]
