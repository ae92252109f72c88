"""install.sh: upgrades that are refused, that go back, that keep a host's packages; on a host of their own."""

import fcntl
import http.server
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from host import ROOT, Host, plug_in, why_not
from quartet.v1 import environment_pb2, experience_pb2
from quartet.v1.environment_pb2_grpc import EnvironmentServiceStub

from quartet_client.authority import create_authority, issue
from quartet_common.errors import AWAY
from quartet_common.ports import free_ports

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(300)]

AGENT = "/etc/quartet/environment/agent.py"
PLAYS = """
import asyncio
from quartet_environment import Endpoint, Task


async def play(task: Task, endpoint: Endpoint) -> float:
    await asyncio.sleep(0.5)
    return 1.0
"""
DRAIN_SECONDS = 10.0  # [server] drain_seconds by default
BACK_SECONDS = 30.0  # from SIGTERM to READY: 1 to 5 s alone, and several times that beside the imports of other suites
UV = ROOT / ".quartet" / "tools" / "bin" / "uv"
SERVICE = "environment"
UNIT = f"/etc/systemd/system/quartet-{SERVICE}.service"
PREVIOUS = "/opt/quartet/.releases/{}/previous"
LIST = f"/etc/quartet/{SERVICE}.packages"
CONFIGURATION = f"/etc/quartet/{SERVICE}.toml"
COMMON = "services/common/quartet_common/__init__.py"
TRACING = "services/common/requirements-tracing.txt"
DISTRIBUTION = f"from importlib.metadata import version; print(version('quartet-{SERVICE}'), version('plug-in'))"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host with two releases of the environment service, which runs; the second one has the host's packages.

    Episodes are played all the time: none may be lost by what the tests do to the service.
    """
    with pytest.MonkeyPatch.context() as patch, closing(Host(tmp_path_factory.mktemp("host"))) as made:
        patch.setenv("UV_COMPILE_BYTECODE", "0")  # faster
        before = made.written()
        made.give_tools()
        refused = made.install(SERVICE, "--with", "protobuf==5.0")
        assert refused.returncode == 2 and "cannot install protobuf==5.0 beside the pins" in refused.stderr, refused
        assert made.written() == before, "a first installation that fails leaves nothing"
        made.give_tools()
        made.path(AGENT).parent.mkdir(parents=True)
        made.path(AGENT).write_text(PLAYS)
        text = (ROOT / "deploy" / "systemd" / f"{SERVICE}.toml").read_text()
        made.path(CONFIGURATION).write_text(text.replace("files = []", f'files = ["{AGENT}:play"]\nworkers = 1'))
        listen(made, port := free_ports(1, neighbor=100)[0])
        accepted(made.install(SERVICE))
        player = Player(port)
        player.start()
        accepted(made.install(SERVICE, "--with", plug_in(made.folder / "plug-in", SERVICE), "--with", ROOT / TRACING))
        yield made
        player.stop()
        assert max(made.drained[SERVICE]) <= DRAIN_SECONDS, made.drained
        assert max(made.away[SERVICE]) <= BACK_SECONDS, made.away
        assert {status for _, status in made.ended} == {0}
        accepted(made.install("--uninstall", "--purge", SERVICE))
        assert made.written() == before and not made.processes


class Player(threading.Thread):
    """Has one episode after the other played, each until it has a reward."""

    def __init__(self, port: int):
        super().__init__()
        self._address = f"127.0.0.1:{port}"
        self._enough = threading.Event()
        self._played = 0
        self._error: BaseException | None = None

    def stop(self) -> None:
        """Raise the error of an episode, if there was one."""
        self._enough.set()
        self.join()
        assert self._played and self._error is None, self._error

    def run(self) -> None:
        try:
            with grpc.insecure_channel(self._address) as channel:
                while not self._enough.is_set():
                    seats = self._play(EnvironmentServiceStub(channel)).seats
                    assert [reward.value for seat in seats for reward in seat.rewards] == [1.0]
                    self._played += 1
        except BaseException as error:
            self._error = error

    def _play(self, stub: EnvironmentServiceStub) -> environment_pb2.EpisodeResult:
        """Try again as a rollout does. Raises grpc.RpcError, AssertionError."""
        environment = experience_pb2.EnvironmentSpec(name=f"{AGENT}:play", served=True)
        prompt = experience_pb2.Prompt(prompt_id="p", task="{}")
        endpoint = environment_pb2.Endpoint(base_url="http://127.0.0.1:9/v1", api_key="key", model="policy")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            request = environment_pb2.RunEpisodeRequest(
                episode_id=str(self._played), environment=environment, prompt=prompt, endpoint=endpoint
            )
            try:
                answer = stub.RunEpisode(request, timeout=60)
                if answer.HasField("finished"):
                    return answer.finished
                assert answer.failure.retryable, answer
            except grpc.RpcError as error:
                if error.code() not in (*AWAY, grpc.StatusCode.RESOURCE_EXHAUSTED):  # no process is free yet
                    raise
            time.sleep(0.1)
        raise AssertionError("an episode was not played within 120 s")


def accepted(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def listen(host: Host, port: int) -> None:
    """Configure the service's port."""
    file = host.path(CONFIGURATION)
    file.write_text(re.sub(r"127.0.0.1:\d+", f"127.0.0.1:{port}", file.read_text()))


def state(host: Host) -> dict[str, object]:
    """What an upgrade that is refused leaves as it was."""
    files = {name: host.path(name).read_text() for name in (UNIT, LIST)}
    releases = sorted(each.name for each in host.path(f"/opt/quartet/.releases/{SERVICE}").iterdir())
    return {**files, "now": host.release(SERVICE), "all": releases, "process": host.processes[SERVICE].pid}


@contextmanager
def changed(path: Path, text: str) -> Iterator[None]:
    """Have a text at the end of a file for a while."""
    before = path.read_text()
    path.write_text(before + text)
    try:
        yield
    finally:
        path.write_text(before)


def test_refused_upgrade_and_rollback_change_nothing(host):
    before = state(host)
    with changed(host.path(CONFIGURATION), "\n[environment.nonsense]\n"):
        for arguments in ([SERVICE], ["--rollback", SERVICE]):
            refused = host.install(*arguments)
            assert refused.returncode == 2 and "nonsense" in refused.stderr, refused
            assert "nothing is changed: " in refused.stderr and state(host) == before
    for arguments, says in (
        (["--with", "pydantic==1.10.2"], "you require pydantic==1.10.2 and pydantic=="),
        (["--without", "pydantic"], f"--without pydantic: allowed is a line of {LIST}"),
        (["--rollback", "--with", "numpy"], "--with and --without are allowed for an installation only"),
    ):
        refused = host.install(*arguments, SERVICE)
        assert refused.returncode == 2 and says in refused.stderr, refused
        assert state(host) == before


def test_rollback_returns_release_unit_and_packages_and_again_the_newer_ones(host):
    older, newer = host.release(SERVICE, PREVIOUS), host.release(SERVICE)
    packages = host.path(LIST).read_text()
    with changed(host.path(f"{older}/quartet-{SERVICE}.service"), "# the older unit's\n"):
        accepted(host.install("--rollback", SERVICE))
        assert host.release(SERVICE) == older and host.path(LIST).read_text() == ""
        assert "# the older unit's\n" in host.path(UNIT).read_text()
    assert executable(host) == f"{older}/bin/python"
    accepted(host.install("--rollback", SERVICE))
    assert host.release(SERVICE) == newer and host.path(LIST).read_text() == packages
    assert executable(host) == f"{newer}/bin/python" and "older unit" not in host.path(UNIT).read_text()


def executable(host: Host) -> str:
    return Path(f"/proc/{host.processes[SERVICE].pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def test_packages_survive_an_upgrade_from_another_checkout(host, tmp_path):
    """Whose requirements files and version count. Meanwhile a running service keeps its files."""
    checkout, running = tmp_path / "checkout", host.release(SERVICE)
    for name in ("deploy/systemd", "protos", "services/common", f"services/{SERVICE}"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (checkout / "services" / SERVICE / "pyproject.toml", checkout / COMMON):
        file.write_text(re.sub('(?m)^(version|__version__) = ".*"$', r'\1 = "0.2.0+g1234567"', file.read_text()))
    (checkout / TRACING).write_text("opentelemetry-api\n")
    assert host.path(LIST).read_text().splitlines() == [str(host.folder / "plug-in"), TRACING]
    assert "opentelemetry_sdk" in installed(host)

    accepted(host.install("--no-start", SERVICE, checkout=checkout))
    release = host.release(SERVICE)
    assert release.startswith(f"/opt/quartet/.releases/{SERVICE}/0.2.0+g1234567-")
    assert accepted(host.run(f"{release}/bin/python", "-c", DISTRIBUTION)) == "0.2.0+g1234567 2.5\n"
    assert "opentelemetry_api" in installed(host) and "opentelemetry_sdk" not in installed(host)

    accepted(host.install("--no-start", SERVICE, "--without", TRACING))
    assert host.path(LIST).read_text().splitlines() == [str(host.folder / "plug-in")]
    assert "opentelemetry" not in installed(host)
    assert executable(host) == f"{running}/bin/python" and host.path(running).is_dir()
    assert release == host.release(SERVICE, PREVIOUS)
    accepted(host.install("--rollback", SERVICE))  # which restarts it
    assert executable(host) == f"{release}/bin/python" and not host.path(running).exists()


def installed(host: Host) -> str:
    return "\n".join(each.name for each in host.path(host.release(SERVICE)).glob("lib/*/site-packages/*"))


def test_installation_of_an_older_installer_returns_if_the_first_release_does_not_start(host):
    was, folder = host.release(SERVICE), f"/opt/quartet/{SERVICE}"
    accepted(host.run("sh", "-c", f"rm {folder} && cp -a {was} {folder} && rm -r /opt/quartet/.releases"))
    accepted(host.run("sh", "-c", f"rm {folder}/packages {folder}/*.service && echo '# old' >>{UNIT}"))
    before = host.path(CONFIGURATION).read_text()
    with socket.create_server(("127.0.0.1", 0)) as other:
        listen(host, other.getsockname()[1])
        failed = host.install(SERVICE)
    says = f"quartet-{SERVICE}.service does not start: journalctl -u quartet-{SERVICE} says why"
    assert failed.returncode == 2 and says in failed.stderr and "--rollback" in failed.stderr, failed
    assert "# old" not in host.path(UNIT).read_text() and SERVICE not in host.processes
    host.path(CONFIGURATION).write_text(before)
    accepted(host.install("--rollback", SERVICE))
    assert "/older-" in executable(host) and host.path(UNIT).read_text().endswith("# old\n")


def test_second_installer_at_a_time_is_refused(host):
    folder = os.open(host.path("/etc"), os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        refused = host.install(SERVICE)
        assert refused.returncode == 2 and "another install.sh holds the lock on the folder /etc" in refused.stderr
        accepted(host.install("--check", SERVICE))
    finally:
        os.close(folder)


def test_service_without_a_previous_release_cannot_roll_back(host):
    refused = host.install("--rollback", "reward")
    assert refused.returncode == 2 and "reward has no previous release; allowed after an upgrade" in refused.stderr


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A package index behind TLS, and the certificate of its authority, which this machine does not know."""
    folder = tmp_path_factory.mktemp("index")
    create_authority(folder / "pki")
    issue(folder / "pki", "index", ["operator"])
    served, wheels = folder / "served", folder / "served" / "more" / "plug-in"
    (served / "simple" / "plug-in").mkdir(parents=True)
    build = [UV, "build", "--quiet", "--wheel", plug_in(folder / "source", SERVICE), "--out-dir", wheels]
    subprocess.run(build, check=True, timeout=60)
    (wheels / "index.html").write_text(
        "".join(f'<a href="{each.name}">{each.name}</a>' for each in wheels.glob("*.whl"))
    )
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=served)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "pki" / "index.pem", folder / "pki" / "index-key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://localhost:{server.server_port}", folder / "pki" / "ca.pem"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("certificate", ["PIP_CERT", "cert", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", ""])
def test_uv_uses_the_indexes_and_certificates_of_pip(host, index, tmp_path, certificate):
    url, authority = index
    variables = dict.fromkeys(("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"), "")
    variables |= {"PIP_FIND_LINKS": "", "PIP_INDEX_URL": f"{url}/simple", "UV_NO_CACHE": "1"}
    if certificate == "cert":
        file = tmp_path / "pip.conf"
        file.write_text(f"[global]\ncert = {authority}\n[install]\nextra-index-url =\n  {url}/simple\n  {url}/more\n")
        variables["PIP_CONFIG_FILE"] = str(file)
    else:
        variables |= {"PIP_CONFIG_FILE": os.devnull, "PIP_EXTRA_INDEX_URL": f"{url}/more"}  # no file of this machine
        variables |= {certificate: str(authority)} if certificate else {}
    functions = f"source <(head -n -1 '{ROOT}/deploy/systemd/install.sh'); use_pip_settings"
    uv = '"$PREFIX/.tools/bin/uv" pip install --no-deps --target "$0" plug-in'
    done = host.run("bash", "-c", f"{functions}; {uv}", tmp_path / "site", **variables)
    if certificate:
        accepted(done)
        assert (tmp_path / "site" / "plug_in.py").exists()
    else:
        assert done.returncode and "invalid peer certificate" in done.stderr
