"""The systemd units, checked by systemd-analyze, and their installer.

Tests have no running systemd: the installer is executed on a host of its own, and the unit's command line is started as
the unit's user with a notification socket, as systemd would.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from host import Host, directives, why_not

from quartet_client.authority import EXPORTED, create_authority, export, issue
from quartet_common.gpus import LEAST_DRIVER

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "deploy" / "systemd"
INSTALLER = UNITS / "install.sh"
SERVICES = ("broker", "reward", "rollout", "environment", "trainer")
EXPOSURE = {"broker": 2.5, "reward": 2.5, "rollout": 4.0, "environment": 2.5, "trainer": 4.0}
"""Upper bounds of the exposure by `systemd-analyze security`."""

needs_systemd_analyze = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not here")


def unit(service: str) -> Path:
    return UNITS / f"quartet-{service}.service"


@needs_systemd_analyze
@pytest.mark.parametrize("service", SERVICES)
def test_systemd_understands_the_unit(service, tmp_path):
    """With a command that exists, because `verify` checks that."""
    copy = tmp_path / unit(service).name
    copy.write_text(unit(service).read_text().replace(f"/opt/quartet/{service}/bin/quartet-{service}", "/bin/true"))
    answer = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (0, "")


@needs_systemd_analyze
@pytest.mark.parametrize("service", SERVICES)
def test_units_keep_systemd_exposure_low(service):
    command = ["systemd-analyze", "security", "--offline=true", str(unit(service))]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    exposure = float(re.search(r"exposure level for \S+: ([0-9.]+)", answer.stdout)[1])
    assert exposure <= EXPOSURE[service], answer.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_what_every_unit_must_say(service):
    said = directives(unit(service).read_text())
    assert said["Type"] == ["notify"] and int(said["WatchdogSec"][0]) > 0
    assert said["User"] == said["Group"] == [f"quartet-{service}"]
    assert said["RestartPreventExitStatus"] == ["2"]
    # The drain's default is 10 seconds; systemd must not kill before it.
    assert int(said["TimeoutStopSec"][0]) >= 15
    assert said["Restart"] == ["on-failure" if service == "trainer" else "always"]


def test_the_installer_has_the_launchers_version_of_uv_and_the_least_driver():
    launcher = (ROOT / "deploy" / "local" / "installer.py").read_text()
    script, uv = INSTALLER.read_text(), re.search(r'^UV_VERSION = "(.+)"$', launcher, re.MULTILINE)[1]
    assert f"UV_VERSION={uv}\n" in script and f"LEAST_DRIVER={LEAST_DRIVER}\n" in script


def test_an_option_without_its_value_is_named():
    answer = subprocess.run([str(INSTALLER), "reward", "--python"], capture_output=True, text=True, timeout=60)
    assert (answer.returncode, answer.stderr) == (2, "install.sh: --python needs a path\n")


@pytest.mark.skipif(bool(why_not()), reason="it needs root and mount namespaces")
@pytest.mark.timeout(400)
def test_a_service_is_installed_runs_as_its_user_and_is_taken_away(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_COMPILE_BYTECODE", "0")  # faster
    tmp_path.chmod(0o755)
    (folder := tmp_path / "host").mkdir()
    with closing(Host(folder)) as host:
        before = host.written()
        host.give_tools()
        made = host.install("--no-start", "reward")
        assert made.returncode == 0, made.stdout + made.stderr
        first = host.release("reward")
        configuration = host.path("/etc/quartet/reward.toml")
        configuration.write_text(configuration.read_text().replace(":7102", ":17102"))
        assert host.path("/etc/systemd/system/quartet-reward.service").read_text() == unit("reward").read_text()
        a_key_that_its_user_cannot_read_is_told(host, tmp_path / "pki")
        assert ":17102" in configuration.read_text(), "an upgrade keeps the configuration"
        assert host.release("reward") != first, "and exchanges the environment"
        run_as_the_unit_would(host, "reward")
        gone = host.install("--uninstall", "--purge", "reward")
        assert gone.returncode == 0, gone.stderr
        assert host.written() == before
        assert "quartet-reward" not in host.path("/etc/passwd").read_text()


def user_of(host: Host, service: str) -> tuple[int, int]:
    """Ids of a service's user and group."""
    lines = host.path("/etc/passwd").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"quartet-{service}:")]
    return int(line.split(":")[2]), int(line.split(":")[3])


def a_key_that_its_user_cannot_read_is_told(host: Host, pki: Path) -> None:
    """The installer and the status that the service sends to systemd report it."""
    configuration, variables = (host.path(f"/etc/quartet/reward.{ending}") for ending in ("toml", "env"))
    keys, install = Path("/etc/quartet/reward"), host.install
    create_authority(pki)
    issue(pki, "reward", ["reward"])
    export(pki, "reward", host.path(str(keys)))
    names = zip(("tls_ca", "tls_certificate", "tls_key"), EXPORTED, strict=True)
    lines = "".join(f'{key} = "{keys / name}"\n' for key, name in names)
    configuration.write_text(f"{configuration.read_text()}\n[security]\n{lines}")
    says = f"security.tls_ca: cannot read '{keys}/ca.crt': Permission denied"
    release = host.release("reward")
    for arguments in (["--no-start", "reward"], ["reward"]):
        told = install(*arguments)
        assert told.returncode == 2 and says in told.stderr and "nothing is changed" in told.stderr, told
        assert host.release("reward") == release
    assert says in last_state(host, "reward")
    export(pki, "reward", host.path(str(keys)), user_of(host, "reward")[0])
    assert "not started" not in install("--no-start", "reward").stdout
    assert json.loads(install("--check", "reward").stdout)["address"] == "127.0.0.1:17102"
    variables.write_text(f"{variables.read_text()}\nQUARTET_OPTIONS=--set reward.workers=0\n")
    told = install("--check", "reward")
    assert told.returncode == 2 and "reward.workers: got 0" in told.stderr, "the unit's options count"
    variables.write_text(variables.read_text().replace("reward.workers=0", "reward.workers=2"))


def last_state(host: Host, service: str) -> str:
    """Start the unit's command as its user; return the status that it sends to systemd before it exits with 2."""
    with started_as_by_systemd(host, service) as (process, listener):
        assert process.wait(60) == 2
        return listener.recv(4096).decode()


def run_as_the_unit_would(host: Host, service: str) -> None:
    """Start the unit's command as its user; wait for READY, a watchdog message, and a clean exit on SIGTERM."""
    with started_as_by_systemd(host, service, WATCHDOG_USEC="1000000") as (process, listener):
        heard = set[str]()
        while not {"READY=1", "WATCHDOG=1"} <= heard:  # recv has a deadline
            heard.update(listener.recv(4096).decode().splitlines())
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@contextmanager
def started_as_by_systemd(
    host: Host, service: str, **variables: str
) -> Iterator[tuple[subprocess.Popen, socket.socket]]:
    """The unit's command, as its user, and the socket at which it notifies systemd."""
    user, group = user_of(host, service)
    command = [
        word
        for word in shlex.split(directives(unit(service).read_text())["ExecStart"][0])
        if word != "$QUARTET_OPTIONS"
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address := f"\0quartet-test-{os.getpid()}")
        listener.settimeout(60)
        environment = {"PATH": "/usr/bin:/bin", "NOTIFY_SOCKET": "@" + address[1:], **variables}
        identity = ("setpriv", "--reuid", user, "--regid", group, "--clear-groups")
        process = subprocess.Popen(host.command(*identity, *command), env=environment, cwd="/")
        try:
            yield process, listener
        finally:
            process.kill()
            process.wait()
