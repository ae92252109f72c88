"""Dockerfiles and compose file pass linters, and agree with each other and with the services.

No container engine is needed: hadolint reads the Dockerfiles.
"""

import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from quartet_client.authority import EXPORTED
from quartet_common.config import AddressesSection, load_config
from quartet_common.ports import free_ports
from quartet_server.probe import AnySection

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "deploy" / "containers"
sys.path.append(str(ROOT / "tests" / "preloaded"))
from started import Started  # noqa: E402

SERVICES = ("broker", "reward", "rollout", "environment", "trainer")
PORTS = {kind: int(getattr(AddressesSection(), kind).rpartition(":")[2]) for kind in SERVICES}


CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc")


def may_unshare() -> bool:
    return subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode == 0


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def dockerfile(service: str) -> str:
    return (CONTAINERS / f"{service}.Dockerfile").read_text()


@pytest.mark.parametrize("service", (*SERVICES, "client"))
def test_hadolint_finds_nothing(service):
    command = [tool("hadolint"), "--format", "json", str(CONTAINERS / f"{service}.Dockerfile")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert json.loads(answer.stdout) == []


@pytest.mark.parametrize("service", (*SERVICES, "client"))
def test_an_image_is_no_root_has_a_health_check_and_takes_signals(service):
    text = dockerfile(service)
    last_stage = text[text.rindex("\nFROM ") :]
    assert re.search(r"^USER 10001:10001$", last_stage, re.MULTILINE)
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", last_stage, re.MULTILINE)[1])
    program = "quartet" if service == "client" else f"quartet-{service}"
    assert entry[:3] == ["tini", "--", program], "no shell between the engine's signals and the service"
    check = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", last_stage, re.MULTILINE)
    if service == "client":
        assert not check and "\nHEALTHCHECK NONE\n" in last_stage, "it serves nothing"
    else:
        assert json.loads(check[1]) == ["quartet-check", service]
    copied = re.findall(r"^COPY (?!--from)(?:--chmod=755 )?(\S+)", text, re.MULTILINE)
    assert copied and all((ROOT / path.replace("${PROFILE}", "")).exists() for path in copied)
    for file in re.findall(r"services/\S+\.txt", text):
        for profile in ("", "-gpu"):
            assert (ROOT / file.replace("${PROFILE}", profile)).is_file(), file


def test_the_containers_run_file_is_one():
    for service in SERVICES:
        config = load_config(service, AnySection, CONTAINERS / "run.toml")
        files = (config.security.tls_ca, config.security.tls_certificate, config.security.tls_key)
        assert files == tuple(Path("/etc/quartet/pki") / name for name in EXPORTED)
        # The names that compose gives its containers.
        assert getattr(config.addresses, service) == f"{service}:{PORTS[service]}"
        assert config.security.tls and config.server.bind_host == "0.0.0.0"


def test_compose_has_every_service_as_its_image_wants_it():
    services = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())["services"]
    for service in SERVICES:
        composed = services[service]
        assert (ROOT / composed["build"]["dockerfile"]).is_file()
        assert composed["read_only"] and composed["cap_drop"] == ["ALL"]
        assert "healthcheck" not in composed and composed["restart"] != "no", "the image's check ends what hangs"
        (keys,) = (volume for volume in composed["volumes"] if ":/etc/quartet/pki" in volume)
        assert re.fullmatch(rf"\$\{{QUARTET_KEYS:\?[^}}]+\}}/{service}:/etc/quartet/pki:ro", keys), "its own alone"
    assert services["trainer"]["restart"] == "on-failure", "a finished run is not started again"
    assert services["rollout"]["tmpfs"] == ["/tmp:exec"], "vLLM loads libraries that it compiles there"


@pytest.mark.skipif(not may_unshare(), reason="namespaces of processes are not permitted here")
def test_the_health_check_ends_a_container_whose_service_hangs(tmp_path):
    """Process 1 is a shell called tini, in namespaces as of a container."""
    address = f"127.0.0.1:{free_ports(1, neighbor=100)[0]}"
    (tmp_path / "run.toml").write_text(f'[addresses]\nreward = "{address}"\n')
    (tmp_path / "tini").symlink_to("/bin/sh")
    check = (CONTAINERS / "check.sh").read_text().replace("/etc/quartet/run.toml", str(tmp_path / "run.toml"))
    (tmp_path / "check.sh").write_text(check.replace("--timeout 15", "--timeout 2"))
    reward = ROOT / ".quartet" / "envs" / "reward" / "bin"
    service = [tmp_path / "tini", "-c", '"$@" & wait $!', "tini", reward / "quartet-reward", tmp_path / "run.toml"]
    environment = {**os.environ, "PATH": f"{reward}:{os.environ['PATH']}"}
    container = Started([*CONTAINER, *service], tmp_path / "reward.log", env=environment)
    try:
        container.wait_until(lambda: "serving at" in container.said(), "it answers")
        (shell,) = children(container.pid)
        (hung,) = children(shell)
        assert os.readlink(f"/proc/{shell}/ns/pid") != os.readlink("/proc/self/ns/pid")
        inside = ["nsenter", f"--target={shell}", "--user", "--pid", "--mount", "sh", tmp_path / "check.sh", "reward"]
        checked = partial(subprocess.run, inside, env=environment, timeout=60, capture_output=True, check=False)
        container.wait_until(lambda: checked().returncode == 0, "it is healthy")
        os.kill(hung, signal.SIGSTOP)
        assert checked().returncode
        container.wait(20)
    finally:
        container.close()


def test_on_gpus_rollout_and_trainer_are_built_for_them_and_have_one_each():
    services = yaml.safe_load((CONTAINERS / "compose.gpu.yaml").read_text())["services"]
    devices = []
    for service in ("rollout", "trainer"):
        arguments = services[service]["build"]["args"]
        known = set(re.findall(r"^ARG (\w+)", dockerfile(service), re.MULTILINE))
        assert arguments["PROFILE"] == "-gpu" and set(arguments) <= known
        assert dockerfile(service).count("FROM ${BASE}") == 2, "both stages have one Python"
        (device,) = services[service]["deploy"]["resources"]["reservations"]["devices"]
        assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
        devices += device["device_ids"]
    assert len(set(devices)) == len(devices) == 2
