"""A dry run refuses and warns of what the start does, in the same sentences; certificates as peers would judge them."""

import json
import shutil
import socket
import sys
from pathlib import Path

import pytest
from certificate_files import make, sign_again
from cryptography.x509.oid import ExtendedKeyUsageOID

from quartet_client.authority import create_authority
from quartet_common.config import SecuritySection
from quartet_common.ports import free_port
from quartet_common.sections import Section
from quartet_server.cli import service_main


class Any(Section, extra="allow"):
    """A section with whatever keys."""


async def serve(config, host):
    raise AssertionError("the start should have refused this configuration")


class Said:
    """What a service's command line answered."""

    def __init__(self, status: int, output: str, errors: str):
        self.status = status
        self.problems = [line for line in errors.splitlines() if line.startswith("quartet-")]
        self.warnings = [line for line in errors.splitlines() if " WARNING " in line]
        self.plan = json.loads(output) if output else {}


@pytest.fixture
def said(capsys):
    """Run the command line of a service."""

    def run(kind: str, *settings: str, options: tuple[str, ...] = ("--dry-run",)) -> Said:
        words = [word for setting in settings for word in ("--set", setting)]
        status = service_main(kind, Any, lambda config: {}, serve, [*words, *options])
        return Said(status, *capsys.readouterr())

    return run


def refused(said, kind: str, *settings: str) -> list[str]:
    """Return the problems of the dry run, which must be those of the start."""
    dry, start = said(kind, *settings), said(kind, *settings, options=())
    assert (dry.status, start.status) == (2, 2)
    assert dry.problems == start.problems
    return dry.problems


def test_settings_that_the_start_refuses(said, tmp_path):
    (tmp_path / "garbage.pem").write_text("no certificate")
    mistakes = {
        "security.token_file=/gone": "security.token_file: cannot read '/gone': no such file or directory",
        "server.bind_host=0.0.0.0": "reward: 0.0.0.0 is not loopback and [security] has no TLS",
        "server.metrics_port_offset=9999": "server.metrics_port_offset: 69998 is no port; ports end at 65535",
        "tracing.file=/dev/null/trace.json": "tracing.file: '/dev/null' cannot be written: '/dev/null' is not a",
        f"tracing.tls_ca={tmp_path / 'garbage.pem'}": "garbage.pem' holds no PEM certificate",
    }
    for setting, sentence in mistakes.items():
        (problem,) = refused(said, "reward", "addresses.reward=127.0.0.1:59999", setting)
        assert sentence in problem
    assert len(refused(said, "reward", "addresses.reward=127.0.0.1:59999", *mistakes)) == len(mistakes) - 1, (
        "all at once; of [tracing] the first"
    )


def test_a_trace_file_that_is_a_folder(said, tmp_path):
    (problem,) = refused(said, "reward", f"tracing.file={tmp_path}")
    assert problem.endswith(f"tracing.file: cannot write '{tmp_path}': it is a folder")


@pytest.mark.parametrize("setting", ["endpoint=127.0.0.1:4317", "file=trace.json"])
def test_packages_for_traces_that_are_not_installed(said, monkeypatch, tmp_path, setting):
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    (problem,) = refused(said, "reward", f"tracing.{setting}")
    assert "the packages that send traces are not installed" in problem and "opentelemetry-sdk" in problem
    assert not (tmp_path / "trace.json").exists()


def test_a_dry_run_makes_no_trace_file_and_warns_of_a_collector_that_does_not_answer(said, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as collector:
        endpoint = f"tracing.endpoint=http://127.0.0.1:{collector.getsockname()[1]}"
        assert said("reward", endpoint, f"tracing.file={tmp_path / 'new' / 'trace.json'}").plan["warnings"] == []
    answer = said("reward", f"tracing.endpoint=http://127.0.0.1:{free_port()}")
    (warning,) = answer.plan["warnings"]
    assert answer.status == 0 and "no collector answers" in warning and warning in answer.warnings[0]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def certificate(tmp_path):
    """Make a certificate as `certificate_files.make`; return the settings that name it."""
    return lambda role="rollout", *given, **more: names(make(tmp_path, role, *given, **more))


def names(security: SecuritySection) -> list[str]:
    files = security.model_dump(include={"tls_ca", "tls_certificate", "tls_key"})
    return [f"security.{key}={path}" for key, path in files.items()]


def test_a_good_certificate_is_accepted(said, certificate):
    own = certificate(hosts=("gpu7.example", "10.0.0.7", "*.rollout"))
    for address in ("127.0.0.1", "gpu7.example", "10.0.0.7", "[::1]", "pod-0.rollout"):
        answer = said("rollout", *own, f"addresses.rollout={address}:7103")
        assert answer.status == 0 and answer.plan["warnings"] == [], answer.problems


@pytest.mark.parametrize(
    ("dates", "sentence"), [((-9, -8), "has expired; issue it again"), ((1, 2), "is not valid yet")]
)
def test_a_certificate_of_another_time_is_refused(said, certificate, tmp_path, dates, sentence):
    (problem,) = refused(said, "rollout", *certificate(dates=dates))
    assert f"security.tls_certificate: '{tmp_path}/rollout/tls.crt' {sentence}" in problem


@pytest.mark.parametrize(("dates", "warns"), [((-80, 10), True), ((-6, 1), True), ((-1, 6), False)])
def test_a_certificate_that_expires_soon_for_its_life_is_a_warning(said, certificate, dates, warns):
    answer = said("rollout", *certificate(dates=dates))
    assert answer.status == 0
    assert ["tls.crt' expires in " in warning for warning in answer.plan["warnings"]] == [True] * warns


def test_a_certificate_of_another_role_is_refused(said, certificate):
    own = certificate("trainer")
    (problem,) = refused(said, "rollout", *own)
    assert "is not that of a rollout at '127.0.0.1'; issue it with --role rollout --host 127.0.0.1" in problem
    (problem,) = refused(said, "rollout", *own, "security.server_roles=false")
    assert "has the role trainer; allowed: rollout (issue it with --role rollout)" in problem
    assert said("rollout", *own, "security.roles=false").status == 0


def test_a_certificate_for_other_hosts_is_refused(said, certificate):
    own = certificate(hosts=("gpu7.example",))
    for address in ("gpu8.example", "10.0.0.8"):
        (problem,) = refused(said, "rollout", *own, f"addresses.rollout={address}:7103")
        assert f"is not that of a rollout at '{address}'" in problem
    (problem,) = refused(said, "rollout", *own, "rollout.advertise_address=gpu8.example:7103")
    assert "at 'gpu8.example'" in problem


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_host_that_the_run_file_does_not_say_is_not_checked(said, certificate, tmp_path, address):
    own = names(without_local_hosts(make(tmp_path, "rollout", ("gpu7.example",)), tmp_path))
    assert said("rollout", *own, f"addresses.rollout={address}:7103", "server.bind_host=0.0.0.0").status == 0
    assert said("rollout", *own, "addresses.rollout=127.0.0.1:7103").status == 2


def without_local_hosts(security: SecuritySection, folder: Path) -> SecuritySection:
    """Sign the certificate again without localhost, as another CA would."""
    sign_again(folder / "pki", "rollout", 0, 90, without=("localhost", "127.0.0.1", "::1"))
    shutil.copy(folder / "pki" / "rollout.pem", folder / "again.pem")
    return security.model_copy(update={"tls_certificate": folder / "again.pem"})


def test_a_certificate_of_another_authority_and_a_torn_pair_are_refused(said, tmp_path):
    own = make(tmp_path, "rollout")
    create_authority(tmp_path / "foreign")
    shutil.copy(tmp_path / "foreign" / "ca.pem", tmp_path / "other.crt")
    (problem,) = refused(said, "rollout", *names(own.model_copy(update={"tls_ca": tmp_path / "other.crt"})))
    assert "is of another CA than security.tls_ca" in problem
    other = make(tmp_path, "trainer")
    (problem,) = refused(said, "rollout", *names(own.model_copy(update={"tls_key": other.tls_key})))
    assert "are not of one pair" in problem


@pytest.mark.parametrize(("role", "status"), [("rollout", 2), ("trainer", 2), ("broker", 0), ("reward", 0)])
def test_a_certificate_for_servers_alone_is_enough_for_a_service_that_calls_nobody(said, certificate, role, status):
    answer = said(role, *certificate(role, purposes=[ExtendedKeyUsageOID.SERVER_AUTH]))
    assert answer.status == status, answer.problems
    assert all("extended key usage" in problem for problem in answer.problems)


def test_a_secret_that_anybody_may_read_is_a_warning(said, tmp_path):
    own, token = make(tmp_path, "rollout"), tmp_path / "token"
    token.write_text("secret")
    for mode, keys in ((0o640, []), (0o644, ["security.token_file", "security.tls_key"])):
        token.chmod(mode)
        Path(str(own.tls_key)).chmod(mode)
        answer = said("rollout", *names(own), f"security.token_file={token}")
        assert answer.status == 0 and [warning.partition(":")[0] for warning in answer.plan["warnings"]] == keys
    assert "can be read by every user of this host: chmod o-r" in answer.plan["warnings"][0]
